"""What asks for a GPU must not pass without one."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def on_a_gpu():
    import jax  # here: what collects these tests elsewhere needs none

    assert jax.default_backend() == "gpu", "these tests ask for a GPU; jax found none"


@pytest.fixture(autouse=True, scope="session")
def every_number_of_rows():
    """As in tests/bonsai_jax/conftest.py."""
    from bonsai_jax.engine import stand_in

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "MOST_S", -1.0)
        yield
