"""What asks for a GPU must not pass without one."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def on_a_gpu():
    import jax  # here: what collects these tests elsewhere needs none

    assert jax.default_backend() == "gpu", "these tests ask for a GPU; jax found none"
