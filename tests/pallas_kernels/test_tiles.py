"""The layouts of the integer kernels, on any machine: tiling is invertible, and lanes read the weights.

The functions of `LANES` are traced into a kernel that runs in numpy (lockstep). The fragments of the tensor
core are those of the PTX manual.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QTensor, dequantize, device, formats
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer
from pallas_kernels.matmul.bit_mma import decode_s8
from pallas_kernels.matmul.bit_mma import prefill_plan as bit_prefill_plan
from pallas_kernels.matmul.int_mma import bytes as int_bytes
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.int_mma import dequantize as int_dequantize
from pallas_kernels.qtensor import tile, tiled_nbytes
from tests.pallas_kernels import expected_blocks
from tests.pallas_kernels.lockstep import launched, lockstep
from tests.pallas_kernels.stacks import Drawn

INTEGER = formats.names("int")
# Of tiles that are larger than the file's blocks: base 3 becomes 2 bits a weight, and a share of d.
BITS = {"tq1_0": 2.0625, "ptq1_0": 2.125}


def shapes(format, N, K):
    """Of a stack of one matrix's tiles."""
    blocks = (1, N, K // formats.get(format).WEIGHTS)
    draw = lambda: formats.random_fields(format, jax.random.key(0), blocks, 0.0, 1.0)  # noqa: E731
    return jax.eval_shape(lambda: tile(QTensor(draw(), format, (N, K))).fields)


def sizes(format):
    """Whole tiles, and tiles of which as much is beyond the matrix as the format lets be; others are slow."""
    every = [(32, 512), (24, 576), (40, 768), (16, 640)]
    return [(N, K) for N, K in every if K % formats.get(format).WEIGHTS == 0]


tiles_of = jax.jit(tile)  # outside of jit each operation would be compiled alone


@functools.cache
def made(format, N, K) -> Drawn:
    """A stack of two matrices of expected blocks, with their weights. Only tiling runs a program."""
    weights, block = formats.get(format).WEIGHTS, formats.get(format).BLOCK
    expected = expected_blocks.load(format)
    raw, dense = expected.raw.view(block).reshape(-1), expected.weights.reshape(-1, weights)
    which = np.random.default_rng(N).integers(len(raw), size=(2, N, K // weights))
    fields = {name: np.ascontiguousarray(raw[name][which]) for name in block.names}
    w = QTensor(fields, format, (N, K))
    return Drawn(w, jax.device_get(tiles_of(w)), dense[which].reshape(2, N, K))


SIZES = [
    pytest.param(format, *size, marks=[pytest.mark.slow] * (i > 1))
    for format in INTEGER
    for i, size in enumerate(sizes(format))
]


@pytest.mark.parametrize(("format", "N", "K"), SIZES)
def test_tile_and_untile_keep_every_bit(format, N, K):
    module, (w, tiled, dense) = formats.get(format), made(format, N, K)
    untiled, weights = jax.jit(lambda tiled: (module.untile(tiled.fields, (N, K)), dequantize(tiled)))(tiled)
    for name, field in untiled.items():
        got, want = np.asarray(field), w.fields[name]
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    np.testing.assert_array_equal(weights, dense)
    assert tiled.nbytes == 2 * tiled_nbytes(format, (N, K))
    if K % 256 == N % 16 == 0:
        bits = BITS.get(format, 8 * module.BLOCK.itemsize / module.WEIGHTS)
        assert 8 * tiled.nbytes == 2 * N * K * bits


@pytest.mark.parametrize("format", ["pq2_0", "q2_0_g128", "q2_0_g64", "tq2_0", "tq2_0_g128"])
def test_a_code_that_is_no_ternary_weight_survives(format):
    w = made(format, 32, 512).blocks
    qs = np.random.default_rng(1).integers(0, 256, w.fields["qs"].shape, np.uint8)

    @jax.jit
    def round_trip(w):
        tiled = tile(w)
        return formats.get(format).untile(tiled.fields, (32, 512)), dequantize(tiled)

    untiled, dense = round_trip(w.replace(fields={**w.fields, "qs": qs}))
    np.testing.assert_array_equal(untiled["qs"], qs)
    d = w.fields["d"].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(dense).reshape(*d.shape, -1).max(-1), 2 * d)


@pytest.mark.parametrize("format", ["q1_0", *INTEGER])
def test_rows_of_tiled_weights(format):
    N, K = sizes(format)[1]  # the last tile is not whole
    w, ids = made(format, N, K), np.array([[0, N - 1], [17, 8]])
    got, want = jax.jit(lambda *ws: [w[1].rows(ids) for w in ws])(w.tiled, w.blocks)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, w.dense[1, ids])


@pytest.mark.parametrize("format", INTEGER)
def test_what_lanes_read_is_the_weights(format):
    """Each group's bytes as a 16 x group matrix, times the scale and minus the minimum that the lanes hold
    for it, is what the format says the weights are."""
    format_lanes, w = formats.get(format).LANES, made(format, 32, 512)
    tiled, kinds = w.tiled.fields, 1 + format_lanes.minimums
    names, groups, parts = sorted(tiled), 256 // format_lanes.group, format_lanes.group // 8

    def body(*refs):
        *fields, bytes_gmem, scales_gmem = refs
        thread = integer(lanes.thread())
        warp, lane = thread // 32, thread % 32
        place = warp // 2, warp % 2
        words = int_dequantize.read(dict(zip(names, fields, strict=True)), integer(0), *place, lane)
        thread = index(thread)
        for u, unit in enumerate(int_bytes.units(format_lanes, words, lane)):
            for i, a in enumerate(unit.a):
                for part, value in enumerate(a):
                    memory.store(value, bytes_gmem, thread, 8 * u + i, part)
            # What each lane of the quad has, as it is fetched from there, and last what this one has.
            quad = lane & 0xFFFFFFFC
            for t, values in enumerate([*(unit.fetch(quad + t, t) for t in range(4)), unit.scales]):
                for kind, r, h in np.ndindex(kinds, 2, 2):
                    memory.store(values[kind][r][h], scales_gmem, thread, u, t, *map(int, (kind, r, h)))

    with lockstep():
        out = (
            jax.ShapeDtypeStruct((128, groups, parts), jnp.int32),
            jax.ShapeDtypeStruct((128, groups // 8, 5, kinds, 2, 2), jnp.float32),
        )
        stored, scales = map(np.asarray, launched(body, out, [], *(tiled[name] for name in names)))
    thread = np.arange(128)
    own = scales[thread, :, thread % 4]
    np.testing.assert_array_equal(own, scales[:, :, 4])
    values = stored.view(np.int8 if format_lanes.signed else np.uint8).astype(np.float32)
    values = values.reshape(128, groups // 8, 4, 2, parts // 2, 2, 4)  # thread, unit, t, h, half, row, byte
    scale = scales[:, :, :4].transpose(0, 1, 2, 5, 3, 4)[
        ..., None, :, :, None
    ]  # [..., t, h, 1, kind, row, 1]
    got = scale[..., 0, :, :] * values - (scale[..., 1, :, :] if format_lanes.minimums else 0)
    got = got.reshape(2, 2, 8, 4, groups, parts // 2, 2, 4)  # n, k, g, t, group, half, row, byte
    got = got.transpose(0, 6, 2, 1, 4, 3, 5, 7).reshape(32, 512)
    np.testing.assert_array_equal(got, w.dense[0])


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(
    "parts",
    [[("q4_k", 4096)], [("q4_k", 5120), ("q6_k", 1024)], [("q8_0", 48), ("q4_1", 16)], [("q6_k", 151669)]],
)
def test_a_plan_gives_every_tile_to_one_block(parts, rows):
    fields = [(shapes(f, n, 4096),) for f, n in parts]
    planned = int_decode_plan.plan(fields, rows, tuple(f for f, _ in parts), 8)
    assert planned is not None and sum(part.blocks for part in planned.parts) <= device.multiprocessors()
    tiles, blocks = [], []
    for part in planned.parts:
        assert 2 <= part.depth <= max(2, part.tiles * -(-16 // planned.warps))
        for block in range(part.blocks):
            blocks.append(part.first_block + block)
            tiles += range(
                part.above + block * part.tiles, part.above + min((block + 1) * part.tiles, part.n_tiles)
            )
    assert blocks == list(range(len(blocks)))
    assert tiles == list(range(sum(-(-n // 16) for _, n in parts)))


@pytest.mark.parametrize(
    ("n", "k", "matrices", "products", "rows", "warps"),
    [  # of 8 tokens of 30B-A3B, of 32, of one, and of 8 of gpt-oss
        (768, 2048, 2, 64, 1, 4), (2048, 768, 1, 64, 1, 4), (768, 2048, 2, 132, 4, 4),
        (768, 2048, 2, 8, 1, 8), (2880, 2880, 1, 32, 1, 12),
    ],
)  # fmt: skip
def test_several_products_of_few_columns_have_small_blocks(
    n, k, matrices, products, rows, warps, monkeypatch
):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    each = device.multiprocessors() // products
    planned = int_decode_plan.plan([(shapes("q4_k", n, k),) * matrices], rows, ("q4_k",), 8, blocks=each)
    assert planned is not None and planned.warps == warps
    assert planned.parts[0].blocks <= each * (4 if warps == 4 else 1)


@pytest.mark.parametrize("rows", [3, 4, 8])
@pytest.mark.parametrize(
    ("n", "k", "matrices"),
    [(17408, 5120, 2), (5120, 17408, 1), (16384, 5120, 1), (5120, 6144, 1), (12288, 4096, 2)],
)
def test_rows_of_1_bit_weights_keep_eight_warps_on_a_multiprocessor(n, k, matrices, rows, monkeypatch):
    """Four are not enough: they wait for each other's loads (LOG.md)."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    planned = decode_s8.Rounds.plan(rows, k, n // 16, -(-k // 256), matrices)
    assert planned is not None
    blocks = -(-(n // 16) // planned.tiles)
    assert planned.product.warps * -(-blocks // device.multiprocessors()) >= 8


@pytest.mark.parametrize(("steps", "splits"), [(34, 3), (34, 4), (12, 4), (5, 1), (7, 4), (6, 6)])
@pytest.mark.parametrize(("tiles", "blocks"), [(40, 120), (27, 132), (27, 16), (3, 5)])
def test_each_step_of_a_1_bit_product_has_its_turn(steps, splits, tiles, blocks):
    """Of splits that divide steps and of others: each block's steps follow each other in its slots, and each
    step of each tile is some block's."""
    of = bit_prefill_plan.Steps(steps, splits, tiles, blocks)
    assert (splits - 1) * of.each < steps
    done = []
    for block in range(min(blocks, splits * tiles)):
        count, turn = -(-(splits * tiles - block) // blocks), 0
        for i in range(count):
            assert of.before_tile(block, i) == turn
            split = int(of.split(block, i))
            done += [
                (split * of.each + step, (block + i * blocks) % tiles) for step in range(of.in_tile(block, i))
            ]
            turn += int(of.in_tile(block, i))
    assert sorted(done) == sorted(itertools.product(range(steps), range(tiles)))


@pytest.mark.parametrize("rows", [9, 32, 64, 128, 512])
@pytest.mark.parametrize("summed", [False, True])
def test_no_split_of_a_1_bit_product_is_empty(rows, summed, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    for n, steps in itertools.product((64, 1024, 5120, 17408), range(1, 40)):
        m = rows + -rows % (64 if rows > 64 else 16)
        splits = bit_prefill_plan.planned(m, n, steps, 1, 1, summed).splits
        assert (splits - 1) * -(-steps // splits) < steps
