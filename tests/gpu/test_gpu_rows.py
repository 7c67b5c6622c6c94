"""Decode steps of every number of rows that batches have, at the widths of a real model, against the
reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted
from bonsai_jax.network import cache as kv
from checkpoints import synth
from pallas_kernels import QTensor, for_device, formats, matmul
from pallas_kernels.matmul.bit_mma.plane_product import MOST_PLANE_ROWS
from tests.agreement import divergence, log_softmax

pytestmark = pytest.mark.gpu

ROWS = (*range(1, 18), 20, 24, 25, 32, 64, 200)
MOST, STEPS, CONTEXT = ROWS[-1], 3, 512
KL = 5e-3  # nats, of activations rounded to 8 bits; one of 16 rows read as another costs above 1


@pytest.fixture(scope="module")
def models():
    """The same weights by kernels, by the reference, and by kernels with 16-bit activations: layers and
    vocabulary of the 8B are fewer, and all else is as it is."""
    with pytest.MonkeyPatch.context() as patch:
        few = dataclasses.replace(synth.MODELS["bonsai-8b"], layers=2, vocab=2048, specials=2000)
        patch.setitem(synth.MODELS, "few-8b", few)
        how = {"cache_dtype": "float32", "batch_size": MOST, "context": CONTEXT}
        load = lambda **rest: bj.load("synth:few-8b:q1_0", bj.RunConfig(**how, **rest))  # noqa: E731
        yield load(), load(impl="reference"), load(activation_bits=16)


def log_p(model, pieces, cache_dtype="float32") -> np.ndarray:
    """[piece, row, vocabulary] behind each piece, int32 [rows, tokens], of those read in turn."""
    rows, run = len(pieces[0]), dataclasses.replace(model.run, cache_dtype=cache_dtype)
    cache, out = kv.empty(model.config, run, rows, CONTEXT), []
    for piece in pieces:
        lengths = jnp.full(rows, piece.shape[1], jnp.int32)
        scores, cache = jitted.extend(model.params, cache, jnp.array(piece), lengths, model.config)
        out.append(log_softmax(np.asarray(scores[:, -1])))
    return np.stack(out)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, 2000, (STEPS, MOST, 1)).astype(np.int32)


@pytest.fixture(scope="module")
def want(models, tokens):
    return log_p(models[1], tokens)


@pytest.mark.parametrize("rows", ROWS)
def test_a_step_of_any_number_of_rows_is_its_definition(rows, models, tokens, want):
    kernels = models[0]
    assert kernels.params.step.schedule(rows) == ("one_launch" if rows <= 24 else "layer_gemms")
    kl = divergence(want[:, :rows], log_p(kernels, tokens[:, :rows]))
    print(f"{rows} rows: KL {kl.mean():.2e}, of a row at most {kl.max():.2e}")
    assert 0 < kl.max() < KL


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 12])
def test_a_step_in_one_launch_has_16_bits(rows, models, tokens, want):
    kernels = models[2]
    assert kernels.params.step.schedule(rows) == "one_launch"
    kl = divergence(want[:, :rows], log_p(kernels, tokens[:, :rows]))
    print(f"{rows} rows, 16 bits: KL {kl.mean():.2e}, of a row at most {kl.max():.2e}")
    assert 0 < kl.max() < KL / 1000


@pytest.mark.parametrize("keys", [5, 150, 400])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 17, 24])
def test_a_step_reads_keys_of_16_bits(rows, keys, models):
    """The default cache, whose keys one launch copies to shared memory: of one split, and of several."""
    prompt = np.random.default_rng(keys).integers(0, 2000, (rows, keys + STEPS)).astype(np.int32)
    pieces = [prompt[:, :keys], *np.split(prompt[:, keys:], STEPS, axis=1)]
    got, want = (log_p(model, pieces, "float16")[1:] for model in models[:2])
    kl = divergence(want, got)
    print(f"{rows} rows, {keys} keys: KL {kl.mean():.2e}, of a row at most {kl.max():.2e}")
    assert 0 < kl.max() < KL


@pytest.mark.parametrize("rows", [1, 3, 4, 8])
@pytest.mark.parametrize("K", [2048, 2560, 4096])
def test_an_output_matrix_is_what_its_parts_are(K, rows):
    """By a kernel of its own, which parts are too small for. Its blocks pass on coefficients of 22 bits.
    Where products are of bytes, these multiply sums of up to 2^22: in lockstep outputs are then 1.8e-5 to
    2.5e-5 from float64 with the same rounded inputs, where with 24 bits they are 2.5e-6 to 3.3e-6 from it."""
    N, part = 151_669, 5000
    fields = jax.jit(lambda: formats.random_fields("q1_0", jax.random.key(K), (N, K // 128), 0.0, 0.02))()
    x, gamma = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, K), (K,)]))

    def product(first, n):
        chosen = {name: field[first : first + n] for name, field in fields.items()}
        w = for_device(QTensor(chosen, "q1_0", (n, K)))
        y = jax.jit(lambda x: matmul(x, w, gamma=gamma, eps=1e-6))(x)
        return w.products.kernel(rows), np.asarray(y, np.float64)

    kernel, y = product(0, N)
    for first in (0, 70_000, N - part):
        other, want = product(first, part)
        assert kernel == "bit_decode_ring" != other
        got = y[:, first : first + part]
        bound = 1e-5 if rows <= MOST_PLANE_ROWS else 4e-5
        assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)
