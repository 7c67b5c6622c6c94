"""The key-value cache: what it holds."""

import dataclasses

from bonsai_jax.cache import KVCache


def test_the_cache_holds_nothing_of_a_kernel():
    """A kernel's workspace lives as long as a step goes through its layers (layers.decoder)."""
    arrays = [field.name for field in dataclasses.fields(KVCache) if field.metadata.get("pytree_node", True)]
    assert arrays == ["k", "v", "block_table", "lengths", "delta"]
