"""Weights that are loaded are those of the file, however often and beside whatever else."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.weights.read import blocks
from checkpoints import Tensor, open_checkpoint, write_gguf

pytestmark = pytest.mark.gpu

LOADS = 12  # one of ten once had wrong weights (LOG.md, "One of ten loads")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """0.25 GB in 28 layers, whose stacks eight threads load."""
    checkpoint = open_checkpoint("synth:bonsai-1.7b:q1_0")
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    tensors = [Tensor(t.name, t.format, t.shape, np.asarray(blocks(t))) for t in checkpoint.tensors.values()]
    write_gguf(path, checkpoint.metadata, tensors)
    return path


def leaves(params) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(params)]


def test_every_load_has_the_same_bits_as_one_of_a_stack_after_the_other(path, monkeypatch):
    from bonsai_jax import model as models

    run = bj.RunConfig(batch_size=1, context=512)
    with monkeypatch.context() as patched:
        patched.setattr(models, "STACKS_AT_ONCE", 1)
        expected = leaves(bj.load(path, run).params)
    for _ in range(LOADS):
        model = bj.load(path, run)
        for own, one in zip(leaves(model.params), expected, strict=True):
            np.testing.assert_array_equal(own, one)
        del model


# In a process of its own, the second time with its programs from files: nothing else delays the weights.
PROGRAM = """
import functools, sys, jax, jax.numpy as jnp
import bonsai_jax as bj
from bonsai_jax import compile_cache
compile_cache.use_programs()
ahead = functools.partial(bj.compile_ahead, prompts="Once", max_new_tokens=8)
model = bj.load(sys.argv[1], bj.RunConfig(batch_size=1, context=512), on_shapes=ahead)
greedy = bj.SamplingParams(0.0)
(output,) = bj.generate(model, "Once", sampling=greedy, max_new_tokens=8, ignore_eos=True)
print(output.tokens)
words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
bits = lambda leaf: jax.lax.bitcast_convert_type(leaf, words[leaf.dtype.itemsize]).astype(jnp.uint32)
print([int(jnp.sum(bits(leaf), dtype=jnp.uint32)) for leaf in jax.tree.leaves(model.params)])
"""


def test_every_start_says_the_same(path, tmp_path):
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    said = set()
    for _ in range(LOADS):
        command = [sys.executable, "-c", PROGRAM, str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        said.add(done.stdout)
    assert len(said) == 1, said
