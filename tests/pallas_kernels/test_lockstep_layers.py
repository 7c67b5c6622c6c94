"""One launch for all layers in numpy (lockstep): against the layers composed of their definitions, and that
no block waits for ever or writes what another may still read."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import GELU_TANH, SILU, LowRank, attend, cache_layouts
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.matmul.bit_mma import byte_product
from pallas_kernels.step import decode_layers, workspace
from pallas_kernels.step.inputs import StepChanges, StepInputs
from pallas_kernels.step.low_rank_plan import NO_CHANGES, Change, Changes
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn, numbers_of, pages_of
from tests.pallas_kernels.test_activations import DEFINITIONS

attend_jit = jax.jit(attend, static_argnames=("interleaved", "eps"))
GROUP = 128
PAGE_SIZE = 16


def quantized(x, bits):
    """Activations as the products have them: integers of a scale for each group of 128 columns."""
    groups = np.asarray(x, np.float64).reshape(len(x), -1, GROUP)
    scale = np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-20) / (2 ** (bits - 1) - 1)
    return (np.rint(groups / scale) * scale).reshape(x.shape)


def rounded(x):
    """As other blocks have it: 22 bits of mantissa (memory.tagged)."""
    return ((np.asarray(x, np.float32).view(np.int32) + 2) & ~3).view(np.float32).astype(np.float64)


def composed(
    x, w, norms, head_norms, bias, cache, positions, rotation, bits, down_bits, eps, interleaved, hidden,
    changed,
):  # fmt: skip
    """The layers in float64, but attention, which is its definition. changed(matrix, layer, input) is added
    to its output."""
    k_pages, v_pages, table = cache
    for layer in range(len(norms[0])):

        def normed(x, gamma, seen, names, layer=layer):
            norm = 1 / np.sqrt((seen**2).mean(-1, keepdims=True) + eps)
            integers, exact = quantized(seen * gamma[layer], bits), norm * x * gamma[layer]
            return [norm * integers @ w[name][layer].T + changed(name, layer, exact) for name in names]

        (qkv,) = normed(x, norms[0], rounded(x), ["qkv"])
        qkv = qkv if bias is None else qkv + bias[layer]
        out, k_pages, v_pages, _ = attend_jit(
            np.float32(rounded(qkv)[:, None]), k_pages, v_pages, table, positions[:, None],
            layer, rotation=rotation, interleaved=interleaved, eps=eps, norms=head_norms,
            num_keys=int(positions.max()) + 1,
        )  # fmt: skip
        out = np.asarray(out)[:, 0]
        x = x + quantized(rounded(out), bits) @ w["o"][layer].T + changed("o", layer, out)
        gate, up = normed(x, norms[1], rounded(x), ["gate", "up"])
        h = hidden(gate, up)
        x = x + quantized(rounded(h), down_bits) @ w["down"][layer].T + changed("down", layer, h)
    return x, k_pages, v_pages


MANY = [5, 9, 200, 20, -1, 2, 3, 4, 17, 0, 16, 33, 7, 8, 64, -1, 80]
CASES = [
    # layers, hidden, ffn, heads, KV heads, blocks, lengths, bits, bias, normed, interleaved
    (3, 256, 512, 4, 2, 4, [5], 8, False, True, False),
    (2, 384, 1024, 6, 2, 7, [300, -1, 20], 8, True, False, True),  # a block passes on two groups
    (3, 256, 640, 4, 2, 8, [300], 16, True, True, False),
    (2, 384, 384, 4, 4, 40, [257], 16, False, True, False),  # some blocks without a tile
    (2, 384, 512, 6, 2, 8, [600, 20], 8, True, True, False),  # 2 to 4 rows, by planes; warps visit 3 times
    (2, 384, 640, 4, 2, 9, [20, -1, 130], 8, False, True, True),
    (2, 384, 2560, 4, 2, 9, [5, 300, 17, 2], 8, True, False, False),  # down in two splits
    # 8 rows: rounds of tiles, warps without a group
    (2, 640, 896, 4, 2, 16, [5, 9, 130, 20, -1, 2, 3, 4], 8, True, True, False),
    # 9 rows together, down in two splits
    (2, 384, 2560, 4, 2, 20, [5, 9, 300, 20, -1, 2, 3, 4, 17], 8, True, False, False),
    # 11 rows: eight and three, together, and behind the feed-forward one after the other
    (2, 384, 2176, 4, 2, 24, [5, 9, 40, 20, -1, 2, 3, 4, 17, 0, 16], 8, True, True, False),
    # 17 rows, eight, eight and one: attention by two teams of a block, sums among weights, down in two splits
    (2, 384, 2560, 14, 2, 17, MANY, 8, True, True, False),
]
CASES = [(*case, layout) for case, layout in zip(CASES, itertools.cycle(cache_layouts.names()), strict=False)]
# 16 bits as two digits each: 2 rows by planes, 4 by bytes, 8 as 16, and 11 as 22, those in two sections. With
# other caches new keys would be rounded to one side or the other (2.5e-4 with bfloat16, 8e-4 with int8).
CASES += [
    (2, 384, 640, 4, 2, 9, [20, -1], 16, False, True, True, "float32"),
    (2, 384, 2560, 4, 2, 9, [5, 300, 17, 2], 16, True, True, False, "float16"),
    (2, 640, 896, 4, 2, 16, [5, 9, 130, 20, -1, 2, 3, 4], 16, True, True, False, "float32"),
    (2, 384, 2176, 4, 2, 24, [5, 9, 40, 20, -1, 2, 3, 4, 17, 0, 16], 16, False, True, False, "float16"),
]
# 8 bits, but 16 for the inputs of down, as steps of up to eight rows have by default
CASES += [
    (3, 256, 640, 4, 2, 8, [300], (8, 16), True, True, False, "float16"),
    (2, 384, 384, 4, 4, 40, [20, -1], (8, 16), False, True, False, "int8"),
    (2, 384, 2560, 4, 2, 9, [5, 300], (8, 16), True, False, True, "bfloat16"),  # down in two splits
    # one row of a wide model: blocks of 16 warps, of which 8 attend; all of them or 9 have columns
    (2, 4096, 384, 2, 1, 6, [300], (8, 16), True, True, False, "float16"),
    (2, 2304, 384, 4, 2, 5, [20], 8, False, False, True, "bfloat16"),
    (2, 384, 2304, 4, 2, 9, [20], 8, False, True, False, "float16"),  # a tile of down is copied in pieces
]
# Two splits: a row alone, whose blocks make its outputs. Of several rows, who reads splits puts them
# together, also ten of them, and groups of 128 that are of two blocks of attention.
CASES += [
    (3, 384, 512, 4, 2, 20, [150], 8, False, True, False, "float16"),
    (2, 4096, 384, 2, 1, 6, [140], (8, 16), True, True, False, "bfloat16"),
    (3, 384, 512, 4, 2, 66, [900, 500, 20], 8, True, True, False, "float16"),
    (2, 384, 512, 6, 2, 24, [600, 20, 150], 8, False, True, True, "int8"),
    (2, 384, 640, 4, 2, 40, [260, 130, 20, -1, 300, 5], 8, False, True, False, "float16"),
]


def bits_of(bits: int | tuple[int, int]) -> tuple[int, int]:
    """Of a case: those of activations, and of what down reads."""
    return bits if isinstance(bits, tuple) else (bits, bits)


@pytest.mark.parametrize("rows", range(5, 25))
@pytest.mark.parametrize("sizes", [(4096, 12288, 32), (2560, 9728, 32), (2048, 6144, 16)])
def test_a_layer_s_code_stays_small(sizes, rows):
    """Twice as many products in a round are a third more time: a layer's code is more than a multiprocessor
    keeps."""
    shapes = decode_layers.Shapes(rows, *sizes, 8, 128, blocks=132)
    for p in shapes.products().values():
        eights = -(-p.section_rows // 8)
        assert p.together * p.matrices * p.per_warp * 2 * eights <= 24


def test_one_row_of_a_wide_model_has_16_warps():
    """And nothing that has no registers for them, or is slower with them."""
    wide, narrow = (4096, 12288, 32, 8, 128), (2048, 6144, 16, 8, 128)
    warps = lambda *sizes, **rest: decode_layers.Shapes(*sizes, blocks=132, **rest).warps  # noqa: E731
    assert warps(1, *wide) == 16
    assert warps(1, *narrow) == warps(2, *wide) == 8
    assert warps(1, *wide, cache_bits=8) == warps(1, *wide, cache_bits=32) == 8


def changes_of(sizes, parts, ranks, layers, dtype, adapters=None):
    """Random changes of matrices by their names, with those of q, k and v beside qkv: StepChanges, and what
    they add to a matrix's output."""
    rng, scale, made = np.random.default_rng(len(ranks)), 0.5, dict.fromkeys(sizes, ())
    stacked = () if adapters is None else (adapters,)
    for name, rank in ranks.items():
        matrix, start, rows = parts.get(name, (name, 0, sizes.get(name, (0,))[0]))
        columns = sizes[matrix][1]
        draw = lambda *shape, std: np.asarray(  # noqa: E731
            jnp.asarray(std * rng.standard_normal((layers, *stacked, *shape)), dtype)
        )
        a, b = draw(rank, columns, std=columns**-0.5), draw(rows, rank, std=rank**-0.5)
        made[matrix] += (LowRank(a, b, scale * (1 + len(name)), start),)
    chosen = None if adapters is None else np.array([adapters - 1], np.int32)

    def changed(matrix, layer, x):
        y = np.zeros((len(x), sizes[matrix][0]))
        for change in made[matrix]:
            a, b = (np.asarray(part[layer], np.float64) for part in (change.a, change.b))
            a, b = (a, b) if adapters is None else (a[-1], b[-1])
            y[:, change.start : change.start + len(b)] += change.scale * x @ a.T @ b.T
        return y

    return StepChanges(tuple(made.values()), chosen), changed


def both(case, first=None, ranks=None, dtype=jnp.float32, adapters=None, tokens=1, more_pages=2, head_dim=64):
    """(x, keys, values) by the kernel and by definition, and the page table.

    first     in place of x[0, 0]
    tokens    so many neighbouring rows are one sequence's
    more_pages  of a row, than its keys need
    ranks     by matrices that have a low-rank change, of which each is the last of so many `adapters`
    """
    L, hidden, ffn, H, Hkv, blocks, lengths, bits, biased, normed, interleaved, layout = case
    (bits, down_bits), D, eps, B = bits_of(bits), head_dim, 1e-6, len(lengths)
    activation = GELU_TANH if case in (CASES[2], CASES[4]) else SILU
    rng = np.random.default_rng(hidden + blocks)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    width = (H + 2 * Hkv) * D
    sizes = {
        "qkv": (width, hidden),
        "o": (hidden, H * D),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    made = [drawn("q1_0", (L, N, K), seed, K**-0.5) for seed, (N, K) in enumerate(sizes.values())]
    tiled = tuple((w.tiled.fields["words"], w.tiled.fields["scales"]) for w in made)
    dense = {name: np.asarray(w.dense, np.float64) for name, w in zip(sizes, made, strict=True)}
    norms = tuple(1 + 0.1 * draw(L, hidden) for _ in range(2))
    head_norms = tuple(1 + 0.1 * draw(L, D) for _ in range(2)) if normed else (None, None)
    bias = 0.3 * draw(L, width) if biased else None
    pages = (max(lengths) // PAGE_SIZE) + more_pages
    every = B // tokens * pages
    table = np.repeat(rng.permutation(every).reshape(-1, pages).astype(np.int32), tokens, axis=0)
    k_pages, v_pages = (pages_of(layout, draw(L, every, PAGE_SIZE, Hkv, D)) for _ in range(2))
    positions = np.asarray(lengths, np.int32)
    angle = np.float32(positions[:, None, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2)))
    rotation, x = (np.cos(angle), np.sin(angle)), draw(B, hidden)
    x[0, 0] = x[0, 0] if first is None else first
    changes, changed = None, lambda matrix, layer, x: 0.0
    if ranks:
        starts = {"q": ("qkv", 0, H * D), "k": ("qkv", H * D, Hkv * D), "v": ("qkv", (H + Hkv) * D, Hkv * D)}
        changes, changed = changes_of(sizes, starts, ranks, L, dtype, adapters)
    want = composed(
        x.astype(np.float64), dense, norms, head_norms, bias, (k_pages, v_pages, table),
        positions, rotation, bits, down_bits, eps, interleaved, DEFINITIONS[activation],
        changed,
    )  # fmt: skip
    shapes = decode_layers.Shapes(
        B, hidden, ffn, H, Hkv, D, blocks=blocks, bits=bits, down_bits=down_bits, eps=eps,
        activation=activation, changes=changes.sizes if ranks else NO_CHANGES, tokens=tokens,
    )  # fmt: skip
    assert shapes.refuses() is None
    with lockstep():
        inputs = StepInputs(
            *norms, bias, head_norms if normed else None, tuple(r[:, 0] for r in rotation), k_pages, v_pages,
            table, positions,
        )  # fmt: skip
        got = decode_layers.decode_layers(x, tiled, inputs, changes, shapes=shapes, interleaved=interleaved)
    return got, want, table


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_layers_in_lockstep_are_their_definitions(case):
    # Three warps have two places for keys, as some have in a real shape.
    slots = mock.patch("pallas_kernels.step.shapes.MOST_SLOTS", 11)
    with mock.patch.object(byte_product, "MOST_REGISTERS", 64), slots:
        compare(case, *both(case))


@pytest.mark.parametrize(
    "case",
    [
        (2, 384, 512, 4, 2, 40, [900, 20, 150], 8, True, True, False, "float16"),
        (2, 384, 512, 6, 2, 40, [130, 300, 20, -1, 5], 8, False, True, True, "int8"),
    ],
    ids=str,
)
def test_splits_of_heads_of_128_are_put_together(case):
    """A lane's four outputs of a group are one head's; of heads of 64, two heads'."""
    compare(case, *both(case, head_dim=128))


TOGETHER = [
    # tokens of each sequence, then as above
    (2, (3, 256, 512, 4, 2, 8, [0, 1], 8, False, True, False)),
    (4, (3, 384, 512, 6, 2, 8, [13, 14, 15, 16], 8, True, True, False)),  # from one page to the next
    (4, (2, 384, 640, 4, 2, 9, [600, 601, 602, -1], 8, False, True, True)),
    # From one split to several; the last blocks have no tile.
    (8, (2, 640, 896, 4, 2, 40, [124, 125, 126, 127, 128, 129, 130, 131], 8, True, True, False)),
    (8, (3, 384, 640, 4, 2, 20, [0, 1, 2, 3, 4, -1, -1, -1], 8, False, True, False)),
    (4, (3, 640, 896, 4, 2, 16, [300, 301, 302, 303, 15, 16, 17, -1], 8, True, True, False)),
    (2, (2, 640, 896, 4, 2, 16, [300, 301, 15, 16, -1, -1, 47, -1], 8, True, True, True)),
    # 16 rows, and 24 in sections of 8, of which attention's teams share blocks.
    (8, (2, 384, 2560, 4, 2, 20, [*range(250, 258), *range(8)], 8, True, False, False)),
    (2, (2, 384, 2560, 14, 2, 24, [i + t for i in range(3, 180, 15) for t in (0, 1)], 8, True, True, False)),
]


@pytest.mark.parametrize("layout", ["float16", "int8"])
@pytest.mark.parametrize(("tokens", "case"), TOGETHER, ids=str)
def test_tokens_of_one_sequence_see_each_other(tokens, case, layout):
    """Their keys are stored in the launch that reads them."""
    case, slots = (*case, layout), mock.patch("pallas_kernels.step.shapes.MOST_SLOTS", 11)
    with mock.patch.object(byte_product, "MOST_REGISTERS", 64), slots:
        compare(case, *both(case, tokens=tokens))


def test_keys_that_another_block_stores_are_left_to_chance():
    tokens, case = TOGETHER[1]
    shapes = decode_layers.Shapes
    alone = lambda *sizes, tokens, **rest: shapes(*sizes, **rest)  # noqa: E731
    with mock.patch.object(decode_layers, "Shapes", alone), pytest.raises(AssertionError):
        compare((*case, "float16"), *both((*case, "float16"), tokens=tokens))


def compare(case, got, want, table):
    lengths, (bits, down_bits) = case[6], bits_of(case[7])
    # Parts in a million where every code is the same, but now and then one of 8 bits falls to the other side
    # of .5, and all behind it differs by about 1 / 127 of a column. With 16 bits, attention is what differs:
    # its operands have 16 bits of mantissa. Where down alone has them, 8 bits would be off by 1e-2 or more.
    limit = {(8, 8): 2e-2, (8, 16): 8e-3, (16, 16): 2e-4}[bits, down_bits]
    assert (np.linalg.norm(got[0] - want[0], axis=1) < limit * np.linalg.norm(want[0], axis=1)).all()
    for pages_got, pages_want in zip(got[1:], want[1:], strict=True):
        a, b = (np.array(numbers_of(p)) for p in (pages_got, pages_want))
        for row, j in enumerate(lengths):
            if j >= 0:
                new = slice(None), table[row, j // PAGE_SIZE], j % PAGE_SIZE
                assert np.linalg.norm(a[new] - b[new]) < 2e-2 * np.linalg.norm(b[new])
                a[new] = b[new]
        np.testing.assert_array_equal(a, b)


ALL = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), 16)
ADAPTED = [
    # layers, hidden, ffn, heads, KV heads, blocks, lengths, bits, bias, normed, interleaved, layout
    ((3, 256, 512, 4, 2, 4, [5], 8, False, True, False, "float16"), ALL, jnp.float32, None),
    ((3, 256, 640, 4, 2, 8, [300], 16, True, True, False, "float32"), ALL, jnp.bfloat16, None),
    # Blocks without a tile, blocks with rows of q and k, or of k and v; several adapters.
    ((2, 384, 384, 4, 4, 40, [257], 16, False, True, False, "float32"), ALL, jnp.float16, 3),
    ((2, 384, 640, 6, 2, 9, [300], 16, True, True, False, "float32"), ALL, jnp.float32, 2),
    # Other ranks, and matrices without a change.
    ((2, 384, 640, 6, 2, 9, [300], 16, True, True, False, "float32"), {"q": 8, "v": 24}, jnp.float32, None),
    (
        (2, 384, 1280, 4, 2, 7, [-1], 16, True, True, False, "float32"),
        {"k": 4, "v": 12, "o": 32, "up": 20, "down": 4}, jnp.float32, None,
    ),
    (
        (2, 256, 640, 4, 2, 8, [130], 16, True, True, False, "float32"),
        ALL | {"q": 64, "o": 64}, jnp.bfloat16, None,
    ),
    ((3, 256, 640, 4, 2, 8, [20], 16, True, True, False, "float32"), {"v": 8, "gate": 16}, jnp.bfloat16, 1),
]  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(("case", "ranks", "dtype", "adapters"), ADAPTED, ids=str)
def test_with_low_rank_changes_too(case, ranks, dtype, adapters, late, monkeypatch):
    """late: sums of A x come only after they were asked for. Contexts have room for more splits than there
    are keys for: sums are asked for of all of them."""
    if late:
        load = memory.load_early
        nothing = lambda ref, reads: [word & 0 for word in load(ref, reads)]  # noqa: E731
        monkeypatch.setattr(memory, "load_early", nothing)
    got, want, table = both(case, None, ranks, dtype, adapters, more_pages=20)
    compare(case, got, want, table)
    without, *_ = both(case, more_pages=20)
    assert np.linalg.norm(got[0] - without[0]) > 0.05 * np.linalg.norm(without[0])


@pytest.mark.parametrize(
    ("rows", "changes", "reason"),
    [
        (2, [Change(0, 256, 16, 1.0, "float32")], "with an adapter it is for one row; there are 2"),
        (1, [Change(0, 256, 6, 1.0, "float32")], "rank is 6; the kernel has multiples of 4 up to 32"),
        (1, [Change(0, 256, 36, 1.0, "float32")], "rank is 36; the kernel has multiples of 4 up to 32"),
        (1, [Change(0, 256, 68, 1.0, "float16")], "rank is 68; the kernel has multiples of 4 up to 64"),
        (
            1,
            [Change(0, 128, 8, 1.0, "float32"), Change(128, 128, 8, 1.0, "bfloat16")],
            "is bfloat16 and float32; the kernel has one of float32, bfloat16, float16",
        ),
        (1, [Change(0, 256, 8, 1.0, "float64")], "is float64; the kernel has one of"),
        (1, [Change(0, 128, 4, 1.0, "float16"), Change(128, 128, 32, 0.5, "float16")], None),
    ],
)
def test_changes_that_the_launch_does_not_have_are_refused(rows, changes, reason):
    beside = Changes((tuple(changes), (), (), (), ()))
    refused = decode_layers.Shapes(rows, 256, 512, 4, 2, 64, blocks=4, changes=beside).refuses()
    assert refused is None if reason is None else reason in refused


def test_changes_are_refused_where_two_teams_for_attention_share_a_block():
    sizes, changes = (1, 256, 256, 4, 4, 64), Changes(((), (), (), (), (Change(0, 256, 8, 1.0, "float32"),)))
    assert decode_layers.Shapes(*sizes, blocks=3).refuses() is None
    assert "4 share 3" in decode_layers.Shapes(*sizes, blocks=3, changes=changes).refuses()


def test_what_is_left_to_chance_is_an_error():
    with (
        mock.patch.object(lanes, "block_barrier", lambda: None),
        pytest.raises(AssertionError, match="is read while it may be written"),
    ):
        both(CASES[0])


def test_waiting_for_ever_is_an_error():
    with (
        mock.patch.object(decode_layers, "begun", lambda *sizes: workspace.begun(*sizes) & ~3),
        pytest.raises(AssertionError, match="waits for ever"),
    ):
        both(CASES[0])
