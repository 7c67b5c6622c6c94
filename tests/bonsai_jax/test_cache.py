"""The key-value cache: what it holds."""

import dataclasses

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import cache
from pallas_kernels import cache_layouts


def test_the_cache_holds_nothing_of_a_kernel():
    """A kernel's workspace lives as long as a step goes through its layers (layers.decoder)."""
    arrays = [
        field.name for field in dataclasses.fields(cache.KVCache) if field.metadata.get("pytree_node", True)
    ]
    assert arrays == ["k", "v", "block_table", "lengths", "delta", "draft"]


@pytest.mark.parametrize("name", cache_layouts.names())
def test_a_model_takes_every_layout(name):
    model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(cache_dtype=name, context=64, page_size=8))
    held = cache.empty(model.config, model.run, rows=1, context=8)
    assert cache_layouts.of(held.k) is cache_layouts.get(name)
    held_bytes = sum(a.nbytes for a in jax.tree.leaves((held.k, held.v)))
    assert cache.bytes_per_token(model.config, name) * 8 == held_bytes
    assert np.isfinite(bj.logits(model, [1, 2, 3])).all()
