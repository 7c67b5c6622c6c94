"""What int_prefill_sm90's lanes decode, and where they put a tile's results, in numpy (lockstep): all but TMA
and the tensor cores."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import GELU_TANH, SILU, clamped_swiglu, formats
from pallas_kernels.gpu import lanes, memory, wgmma
from pallas_kernels.gpu.values import index, integer
from pallas_kernels.matmul.int_mma import float16 as int_float16
from pallas_kernels.matmul.int_mma import prefill_plan as int_prefill_plan
from pallas_kernels.matmul.int_mma import prefill_sm90 as int_prefill_sm90
from tests.pallas_kernels.lockstep import launched, lockstep
from tests.pallas_kernels.stacks import drawn
from tests.pallas_kernels.test_activations import DEFINITIONS
from tests.pallas_kernels.test_gemm import has_float16_scales, in_group_order

INTEGER = formats.names("int")


# Two matrices are other rows of the same lanes, whatever the format: one of each kind of scales.
CASES = [
    pytest.param(format, matrices, marks=[] if every_day else pytest.mark.slow)
    for format in INTEGER
    for matrices in (1, 2)
    for every_day in [matrices == 1 or format in ("q4_0", "q4_k", "q6_k", "q2_k")]
]


@pytest.mark.parametrize(("format", "matrices"), CASES)
def test_a_block_of_weights_is_the_definition_in_the_order_of_the_tensor_core(format, matrices):
    """Bit for bit where the file's scales are float16; else within their rounding and that of what is
    subtracted, 2^-12 of each."""
    format_lanes = formats.get(format).LANES
    n = 64 // matrices
    w = [drawn(format, (n, 256), i) for i in range(matrices)]
    fields = [{name: field[:, 0] for name, field in v.tiled.fields.items()} for v in w]
    names = sorted(fields[0])
    shapes = [fields[0][name].shape[1:] for name in names]
    operands = [
        of[name].reshape(-1, *int_prefill_sm90._shape_by_lanes(shape))
        for of in fields
        for name, shape in zip(names, shapes, strict=True)
    ]

    def body(*refs):
        *refs, out, scales = refs
        by_name = [
            dict(zip(names, refs[i : i + len(names)], strict=True)) for i in range(0, len(refs), len(names))
        ]
        int_float16.put_scales(format_lanes, shapes, by_name, scales)
        int_float16.seen()
        warp, number, g, _ = wgmma.lane()
        at = int_float16.scales_of_warp(scales, warp, format_lanes, g)
        vectors = int_float16.vectors_of([of["words"] for of in by_name], warp, number)
        for step in range(int_prefill_plan.STEPS):
            for i, pair in enumerate(int_float16.step_pairs(format_lanes, step, vectors, at)):
                memory.store(pair, out, warp, number, step, i)

    with lockstep():
        scratch = [plgpu.SMEM((4, int_float16.bytes_of_scales(format_lanes) // 4), jnp.float32)]
        out = jax.ShapeDtypeStruct((4, 32, int_prefill_plan.STEPS, 16), jnp.int32)
        accumulators = np.asarray(launched(body, out, scratch, *operands))
    pairs = accumulators.view(np.float16).reshape(
        4, 8, 4, int_prefill_plan.STEPS, 8, 2, 2
    )  # warp, g, t, step, j, r, e
    got = pairs.transpose(0, 5, 1, 3, 4, 2, 6)
    # Row 16 warp + 8 r + g, or row 8 warp + g of matrix r; column 64 step + 8 j + 2 t + e.
    got = got.reshape(1, 64, 256) if matrices == 1 else got.swapaxes(0, 1).reshape(2, 32, 256)
    for v, result in zip(w, got, strict=True):
        want = in_group_order(v.dense.astype(np.float16), format_lanes.group)
        if has_float16_scales(format):
            np.testing.assert_array_equal(result, want)
        else:
            largest = (
                np.abs(want.reshape(n, -1, format_lanes.group))
                .max(axis=-1)
                .repeat(format_lanes.group, axis=-1)
            )
            error = np.abs(result.astype(np.float32) - want.astype(np.float32))
            assert (error <= 2**-9 * largest.astype(np.float32) + 2**-19).all()  # subnormal scales
            assert np.linalg.norm(error) < 6e-4 * np.linalg.norm(want.astype(np.float32))


@pytest.mark.parametrize(
    ("activation", "added"),
    [(None, False), (None, True), (SILU, False), (GELU_TANH, False), (clamped_swiglu(0.5), False)],
    ids=str,
)
def test_results_are_staged_transposed_and_swizzled(activation, added):
    """Against TMA's order: tiles of 8 tokens x 32 outputs, and in each row the 16 bytes whose number is xored
    with the row's."""
    tokens, stored, first = 128, 64, 64
    matrices = 1 if activation is None else 2
    rng = np.random.default_rng(0)
    outputs = 64 // matrices
    sums = rng.standard_normal((matrices, outputs, tokens)).astype(np.float32)  # [matrix, output, token]
    scale = (2.0 ** rng.integers(-3, 4, stored)).astype(np.float32)
    before = rng.standard_normal((stored, outputs)).astype(np.float32)
    # lane 4 g + t of warp w: outputs 16 w + 8 r + g, or output 8 w + g of matrix r, tokens 8 j + 2 t + e
    accumulators = sums.reshape(4, 2, 8, -1) if matrices == 1 else sums.reshape(2, 4, 8, -1).swapaxes(0, 1)
    accumulators = accumulators.reshape(4, 2, 8, tokens // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    accumulators = accumulators.reshape(4, 32, tokens // 8 * 2, 2)

    def swizzled(x):
        x = x.reshape(stored // 8, 8, outputs // 32, 8, 4)  # tile, row, half, 16 bytes, word
        rows, chunks = np.ogrid[:8, :8]
        return x.transpose(0, 2, 1, 3, 4)[:, :, rows, chunks ^ rows]

    def body(accumulators, scale, before, out, stage):
        warp, number, _, _ = wgmma.lane()
        thread = integer(lanes.thread())
        words = math.prod(stage.type.shape) // 128
        where = [index(thread * words + i) for i in range(words)]
        for at in where:
            memory.store(memory.load(before, at), stage, at)
        lanes.block_barrier()
        values = [memory.load_stored(2, accumulators, [warp, number, i, 0]) for i in range(tokens // 8 * 2)]
        fragments = SimpleNamespace(registers=np.array([*values, None], object)[:-1])
        wgmma.stored_by_lane(fragments, scale, stage, stored, first, activation, added)
        lanes.block_barrier()
        for at in where:
            memory.store(memory.load(stage, at), out, at)

    with lockstep():
        flat = jax.ShapeDtypeStruct((stored * outputs,), jnp.float32)
        scratch = [plgpu.SMEM((stored * outputs,), jnp.float32)]
        got = launched(body, flat, scratch, accumulators, scale, swizzled(before).reshape(-1))
    y = sums[:, :, first : first + stored] * scale
    y = y[0] if matrices == 1 else DEFINITIONS[activation](*np.float64(y))
    want = swizzled(y.T + before if added else y.T).reshape(-1)
    np.testing.assert_allclose(
        got, want, rtol=0 if matrices == 1 else 1e-5, atol=0 if matrices == 1 else 1e-6
    )
