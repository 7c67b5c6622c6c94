"""For all tests of the library."""

import pytest

from bonsai_jax.engine import stand_in


@pytest.fixture(scope="session", autouse=True)
def every_number_of_rows():
    """Each number of prompts has its own program, whatever other tests have compiled: else tests that ask for
    many rows would hold for few (test_stand_in.py has what users have)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "MOST_S", -1.0)
        yield
