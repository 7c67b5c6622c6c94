"""Machines with a GPU may lack the oracles' packages: `pytest -m gpu` must not even import the other
tests."""

import pytest


def pytest_ignore_collect(collection_path, config):
    if config.option.markexpr in ("gpu", "multigpu") and collection_path.name.startswith("test_"):
        return not collection_path.name.startswith("test_gpu")
    return None


@pytest.fixture
def unoptimized():
    """XLA without its optimizations, for tests that compile much and compute little, and that compare what we
    build with itself. What is held against another implementation is compiled as users have it."""
    import jax  # here: some tests need none

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
