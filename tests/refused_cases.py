"""Cases that a kernel refuses are not run, and not reported as skipped: there is nothing to test."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from pallas_kernels import selection


def unless_refused(problem: Callable[..., tuple[str, Any]]) -> pytest.MarkDecorator:
    """A mark: problem(some of the test's parameters) returns a kernel's name and the problem that it is for.
    It is called for tests that are selected (tests/conftest.py), because it may look for a GPU."""
    return pytest.mark.unless_refused.with_args(problem)


def is_refused(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("unless_refused")
    if mark is None:
        return False
    problem = mark.args[0]
    params = item.callspec.params
    kernel, problem = problem(**{name: params[name] for name in inspect.signature(problem).parameters})
    return selection.get(type(problem), kernel).refuses(problem) is not None
