"""Run by test_parallel.py in a process of its own, whose CPU is several devices to JAX: every architecture
over two of them."""

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from tests.bonsai_jax.any_architecture import NAMES, tiny

RUN = bj.RunConfig(page_size=16, context=64, activation_bits=16)
PROMPT = np.random.default_rng(0).integers(0, 256, 30).tolist()


@pytest.mark.parametrize(
    "name",  # one with Mamba 2, experts and a shared expert daily
    [name if name == "granitehybrid" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_two_devices_give_the_logits_of_one(name):
    file = tiny(name, "q8_0")
    whole, split = bj.from_checkpoint(file, RUN), bj.from_checkpoint(file, RUN, mesh=bj.make_mesh(1, 2))
    assert not all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(split.params))
    np.testing.assert_allclose(bj.logits(split, PROMPT), bj.logits(whole, PROMPT), atol=1e-4)
