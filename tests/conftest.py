"""Machines with a GPU may lack the oracles' packages: `pytest -m gpu` must not even import the other
tests."""


def pytest_ignore_collect(collection_path, config):
    if config.option.markexpr in ("gpu", "multigpu") and collection_path.name.startswith("test_"):
        return not collection_path.name.startswith("test_gpu")
    return None
