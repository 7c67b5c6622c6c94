"""The attention kernel in Triton: its numbers in Triton's interpreter, and its PTX, both without a GPU.

Needs the extra `triton` and the dependency group `aot`, and is a step of CI of its own (.ci/run): once with
TRITON_INTERPRET=1 and once without."""

import functools
import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attend, cache_layouts, device, selection
from pallas_kernels.problems import Attention
from pallas_kernels.selection import choose

pytestmark = pytest.mark.triton
# Triton decides at its import whether kernels are interpreted.
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
by_interpreter = pytest.mark.skipif(not INTERPRETS, reason="runs with TRITON_INTERPRET=1")
by_compiler = pytest.mark.skipif(INTERPRETS, reason="runs without TRITON_INTERPRET")

# Query heads, KV heads, head_dim, the last as in Phi-3-mini, StableLM 3B and MobileLLM.
HEADS = [(2, 2, 96), (4, 2, 80), (7, 1, 112)]
OPTIONS = [
    {}, {"softcap": 20.0}, {"window": 37}, {"window": 5, "softcap": 3.0, "scale": 0.3},
    {"window": 37, "sinks": (2.0, -1.0, 40.0, -30.0)},
]  # fmt: skip


def case(heads, tokens, dtype, lengths, page_size=16, layers=2, seed=0):
    """(q, k_pages, v_pages, block_table, positions, layer): the last queries of sequences of these lengths.
    What no sequence has written is NaN."""
    H, Hkv, D = heads
    rng = np.random.default_rng(seed)
    pages = -(-max(lengths) // page_size)
    table = rng.permutation(len(lengths) * pages).reshape(len(lengths), pages).astype(np.int32)
    shape = layers, len(lengths) * pages, page_size, Hkv, D
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    for row, length in enumerate(lengths):
        for at in range(length, pages * page_size):
            k[:, table[row, at // page_size], at % page_size] = np.nan
            v[:, table[row, at // page_size], at % page_size] = np.nan
    positions = np.array(lengths)[:, None] - tokens + np.arange(tokens)
    q = 2 * rng.standard_normal((len(lengths), tokens, H, D)).astype(np.float32)
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    return q, *(jnp.asarray(x, dtype) for x in (k, v)), table, positions, np.array([1], np.int32)


def expected(
    q, k_pages, v_pages, table, positions, layer, *, window=None, scale=None, softcap=None, sinks=None
):  # fmt: skip
    """float64, key by key."""
    q, (k, v) = q.astype(np.float64), (np.asarray(x[1], np.float64) for x in (k_pages, v_pages))
    B, T, H, D = q.shape
    out, group, page_size = np.zeros(q.shape), H // k.shape[2], k.shape[1]
    for row, t, head in np.ndindex(B, T, H):
        position = positions[row, t]
        keys = np.arange(max(0, position + 1 - (window or position + 1)), position + 1)
        if len(keys):
            at = table[row, keys // page_size], keys % page_size, head // group
            scores = k[at] @ q[row, t, head] * (D**-0.5 if scale is None else scale)
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            sink = -np.inf if sinks is None else sinks[head % 4]
            weights = np.exp(scores - (highest := max(scores.max(), sink)))
            out[row, t, head] = weights @ v[at] / (weights.sum() + np.exp(sink - highest))
    return out


class _Array:
    """What the interpreter asks of a pointer's array."""

    def __init__(self, values):
        self.values = np.ascontiguousarray(values)
        self.dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}[
            str(values.dtype)
        ]

    def data_ptr(self) -> int:
        return self.values.ctypes.data


def interpreted(
    q, k_pages, v_pages, table, positions, layer, *, window=None, scale=None, softcap=None, sinks=None
):  # fmt: skip
    from triton.runtime.interpreter import GridExecutor

    from pallas_kernels.attention import triton as kernel

    class OnHost(GridExecutor):  # arrays are numpy's, where they are
        def _init_args_hst(self, arguments, keywords):
            return arguments, keywords

        def _restore_args_dev(self, *arguments):
            pass

    grid, constants = kernel.sizes(q, k_pages, table, window=window, scale=scale, softcap=softcap)
    shape = constants["SHARES"], *q.shape
    out, sums = (np.full(s, np.nan, np.float32) for s in (shape, (*shape[:-1], 2)))
    arrays = [_Array(np.asarray(x)) for x in (q, k_pages, v_pages, table, positions, layer)]
    results = [_Array(out), _Array(sums)]
    function = kernel.paged_attention
    OnHost(function.rewrite(), function.arg_names, grid)(*arrays, *results, **constants)
    sinks = None if sinks is None else jnp.asarray(np.resize(np.array(sinks, np.float32), q.shape[2]))
    return np.asarray(kernel.combined(*(jnp.asarray(r.values) for r in results), sinks))


@by_interpreter
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("tokens", "lengths"), [(1, (300, 3, 17)), (40, (100, 23))])
def test_numbers_are_float64_s(heads, tokens, lengths, options):
    """The interpreter multiplies bfloat16 as integers, so that is left to GPUs (gpu/test_gpu_triton.py)."""
    arguments = case(heads, tokens, "float16", lengths)
    got, want = interpreted(*arguments, **options), expected(*arguments, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@by_interpreter
def test_it_is_called_with_what_its_problem_lists():
    from pallas_kernels.attention import triton as kernel

    selection._check_call("triton", "run", kernel.run, Attention.CALL)


@by_interpreter
def test_a_sequence_s_numbers_do_not_depend_on_the_others():
    q, k, v, table, positions, layer = case((8, 4, 80), 1, "float16", (300, 3, 40))
    alone = interpreted(q[2:], k, v, table[2:], positions[2:], layer)
    assert (alone == interpreted(q, k, v, table, positions, layer)[2:]).all()


@by_compiler
@pytest.mark.parametrize("platform", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize("head_dim", [80, 256])
def test_it_is_lowered_without_a_gpu(platform, tokens, head_dim, monkeypatch):
    """`attend` as a model calls it, by the candidate that is chosen: tensor cores, no local memory, and no
    more shared memory than a block has."""
    from pallas_kernels.attention import triton as kernel

    monkeypatch.setattr(device, "default", lambda: device.GPUS[platform])
    sizes = 8, 4, head_dim, 16, "bfloat16"
    chosen = choose(Attention(platform, "decode" if tokens == 1 else "prefill", *sizes))
    assert (chosen == "triton") == (head_dim == 80 or tokens > 1)  # pages of 16 tokens
    pages = jax.eval_shape(lambda: cache_layouts.empty("bfloat16", (2, 64, 16, 4, head_dim)))
    shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    angles = shape(1, tokens, head_dim // 2, dtype=jnp.float32)
    call = functools.partial(
        attend, interleaved=False, norms=(None, None), eps=1e-6, num_keys=512, impl="triton",
        prefill_impl="triton",
    )  # fmt: skip
    compiled, compile_kernel = [], kernel.jax_triton.triton_lib.TritonFunction._compile_kernel
    watched = lambda *a: compiled.append(result := compile_kernel(*a)) or result  # noqa: E731
    with mock.patch.object(kernel.jax_triton.triton_lib.TritonFunction, "_compile_kernel", watched):
        jax.jit(call).trace(
            shape(1, tokens, 16 * head_dim, dtype=jnp.float32), pages, pages, shape(1, 32), shape(1, tokens),
            shape(), rotation=(angles, angles),
        ).lower(lowering_platforms=("cuda",))  # fmt: skip
    (*_, result) = compiled[0]
    assert result.shared_mem_bytes <= device.shared_bytes()
    assert re.search(r"\bmma\.sync|\bwgmma|\btcgen05", result.binary) and ".local" not in result.binary
