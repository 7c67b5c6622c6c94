"""schemathesis asks the server what its own description allows, and what it does not.

8 requests of each kind; SCHEMATHESIS_EXAMPLES=1000 asks for minutes."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import bonsai_jax as bj
from bonsai_jax.server import openapi
from bonsai_jax.server.app import GETS, POSTS, PROTOCOLS
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.serving import serving

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "8"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server():
    model = bj.load(TINY, bj.RunConfig(context=64, batch_size=4, impl="reference"))
    with serving(model, max_new_tokens=4) as served:
        yield served
        served.idle()


DESCRIBED = schemathesis.openapi.from_dict(openapi.description("1", keys=False))
OPERATIONS = {f"{own.method} {own.path}": own for own in (one.ok() for one in DESCRIBED.get_all_operations())}


MODES = [
    (name, mode)
    for name in OPERATIONS
    for mode in schemathesis.GenerationMode
    if mode is not schemathesis.GenerationMode.NEGATIVE or not name.startswith("get")  # nothing can be wrong
]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_no_request_breaks_the_server_or_its_description(name, mode, server):
    """What the description allows, and what it does not."""

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[name].as_strategy(generation_mode=mode))
    def ask(case):
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)

    ask()


def test_every_route_is_described():
    own = {*openapi.GETS, *openapi.POSTS, "/", "/metrics", "/openapi.json", "/v1/models/{name:path}"}
    assert own == {*GETS, *POSTS, *PROTOCOLS}
