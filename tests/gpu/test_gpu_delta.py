"""The gated delta net's kernels on a GPU, against numpy's float64 and through a model.

PYTHONPATH=. python -m pytest -m gpu tests/gpu/test_gpu_delta.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import jitted
from pallas_kernels.delta import delta_net
from tests.agreement import log_softmax
from tests.pallas_kernels.test_lockstep_delta import EPS, TF32, check, of_float64, problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "K", "V", "grouped"),
    [(16, 48, 128, 128, False), (2, 4, 64, 64, True), (2, 2, 128, 64, False)],
)
@pytest.mark.parametrize("tokens", [1, 2, 64, 200])
def test_kernels_are_float64_s(k_heads, v_heads, K, V, grouped, tokens):
    """Rows at their first token, in the middle, with fewer tokens than others, and ended; the same bits
    twice."""
    args, weights = problem(k_heads, v_heads, K, V, [0, 2, 77, -1], tokens, hidden=5120)
    args[4][2, (tokens + 1) // 2 :] = -1
    want = of_float64(args, weights, grouped)
    run = jax.jit(
        lambda *a: delta_net(
            *a, **weights, eps=EPS, grouped=grouped, impl="delta_step", prefill_impl="delta_chunks"
        )
    )
    got, again = (run(*jax.tree.map(jnp.asarray, args)) for _ in range(2))
    check(got, args, want, 1e-6 if tokens == 1 else TF32)
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_of_both_kinds_of_layers_is_near_its_definition():
    """Prefill of 200 tokens, and 8 steps behind them."""
    ids = np.random.default_rng(3).integers(0, 300, 208).tolist()
    fast, exact = (
        bj.load("synth:tiny-qwen35:f32", bj.RunConfig(impl=impl)) for impl in ("auto", "reference")
    )
    want = bj.logits(exact, ids)
    cache, got = bj.new_cache(fast, 1, 256), []
    assert (cache.delta.impl, cache.delta.prefill_impl) == ("delta_step", "delta_chunks")
    for piece in (ids[:200], *([token] for token in ids[200:])):
        tokens, lengths = jnp.array([piece], jnp.int32), jnp.array([len(piece)], jnp.int32)
        out, cache = jitted.extend(fast.params, cache, tokens, lengths, fast.config)
        got.append(np.asarray(out[0]))
    p, q = log_softmax(want), log_softmax(np.concatenate(got))
    kl = (np.exp(p) * (p - q)).sum(-1)
    print(f"KL of prefill {kl[:200].mean():.1e}, of steps {kl[200:].mean():.1e}")
    assert kl.mean() < 1e-5
