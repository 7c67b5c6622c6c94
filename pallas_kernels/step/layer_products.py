"""All products between the attention of a layer and that of the next in one launch, a block on each
multiprocessor, for weights of 2 to 8 bits.

    attended -> [o, + x] -> x -> [norm, gate, up, SwiGLU] -> [down, + x] -> x -> [norm, next q, k, v]

Each [phase] is a product of kq_decode.py, with its block and its order of sums. A launch that does only one
has an idle memory at both ends: until its first weights are there, and while its last sums are made and the
next one starts. Here a warp's ring runs on from phase to phase (kq_decode_ring.py): weights are on their way
while activations go from block to block. These go as words with a tag in the workspace, as in
decode_layers.py: whoever reads the tag has the value, of 22 bits of mantissa. The residual stream stays exact
with the block that adds to it, which has the same outputs of o and of down.

All blocks must run at once.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, formats
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer
from pallas_kernels.matmul import kq_decode_plan
from pallas_kernels.matmul.activations_shared import eights
from pallas_kernels.matmul.kq_decode_block import Block, IntegerProduct, scratch
from pallas_kernels.matmul.kq_decode_ring import Ring, Share, Stream
from pallas_kernels.qtensor import LayerStack, QTensor, Rows, from_blocks, tile
from pallas_kernels.tiles import COLUMNS, ROWS

Fields = dict[str, Any]  # of one matrix, as its format's `tile` makes them: stacks of one layer


# Slots of a warp's ring at most: what is on its way keeps activations waiting (LOG.md).
DEPTH = 2


class Phase(NamedTuple):
    """A product's weights: rows below rows (two matrices each for SwiGLU), and the format of each part."""

    parts: tuple[tuple[Fields, ...], ...]
    formats: tuple[str, ...]

    @property
    def columns(self) -> int:
        return self.parts[0][0]["words"].shape[2] * COLUMNS


class Planned(NamedTuple):
    """The products of a launch, and what a warp's ring has: slots, and bytes of each."""

    products: tuple[IntegerProduct, ...]
    depth: int
    slot_bytes: int


def plan(phases: Sequence[Phase], rows: int, bits: int, eps: float) -> Planned | None:
    """For the default device; None where so many rows leave no room for weights on their way.

    Of the numbers of warps that leave room for two items or more to each, the one with the fewest idle over
    the columns, weighted by bytes; of equals the largest."""
    padded = kq_decode_plan.columns_of_rows(rows)[1]
    placed = [
        kq_decode_plan.share_out(phase.parts, phase.formats, device.multiprocessors()) for phase in phases
    ]
    slot_bytes = max(
        part.item_bytes(len(phase.parts[0]))
        for phase, parts in zip(phases, placed, strict=True)
        for part in parts
    )
    best = None
    for warps in (16, 12, 8):
        sizes = [
            kq_decode_plan.scratch_bytes(
                parts, len(phase.parts[0]), phase.columns // COLUMNS, padded, warps, bits
            )
            for phase, parts in zip(phases, placed, strict=True)
        ]
        left = device.shared_bytes() - shared_memory.bytes_taken(*map(max, zip(*sizes, strict=True)))
        left -= left % shared_memory.ALIGNMENT
        depth = min(DEPTH, left // (warps * slot_bytes))
        idle = 0
        for phase, parts in zip(phases, placed, strict=True):
            steps = phase.columns // COLUMNS
            tiles = sum(part.n_tiles * part.item_bytes(len(phase.parts[0])) for part in parts)
            idle += tiles * -(-steps // warps) * warps
        if depth >= 2 and (best is None or idle < best[0]):
            best = idle, warps, depth
    if best is None:
        return None
    _, warps, depth = best
    products = tuple(
        IntegerProduct(
            kq_decode_plan.Plan(warps, kq_decode_plan.together(parts, padded), parts), rows, phase.columns,
            sum(part.n_tiles for part in parts), phase.columns // COLUMNS, len(phase.parts[0]), eps, bits,
        )
        for phase, parts in zip(phases, placed, strict=True)
    )  # fmt: skip
    return Planned(products, depth, slot_bytes)


def refuses(rows: int, width: int, hidden: int, ffn: int, bits: int, layer, following) -> str | None:
    """Why a layer's products cannot be one launch on the default device, or None.

    width             of q
    layer, following  (format, rows) of the parts of q, k and v, of o, gate, up and down, of a layer and of
                      the next, or None
    """
    phases = [phase_of(layer[1], width), phase_of(layer[2], hidden, 2), phase_of(layer[4], ffn)]
    if following is not None:
        phases.append(phase_of(following[0], hidden))
    if layer[2] != layer[3]:
        return "gate and up have different formats"
    if plan(phases, rows, bits, 0.0) is None:
        return f"integers of {rows} rows of {ffn} activations leave no room for weights on their way"
    return None


def phase_of(parts, columns: int, matrices: int = 1) -> Phase:
    """Shapes of weights: (format, rows) of their parts."""
    return Phase(
        tuple((tiles_of(format, n, columns),) * matrices for format, n in parts),
        tuple(format for format, _ in parts),
    )


@functools.cache
def tiles_of(format: str, n: int, columns: int) -> Fields:
    """Shapes of what the format's `tile` makes of a stack of one matrix."""
    module = formats.get(format)
    blocks = (1, n, columns // module.WEIGHTS * module.BLOCK.itemsize)
    raw = jax.ShapeDtypeStruct(blocks, jnp.uint8)
    return jax.eval_shape(lambda raw: tile(from_blocks(raw, format)).fields, raw)


def run(
    attended: jax.Array,
    x: jax.Array,
    stacks: Sequence[LayerStack],
    norms: tuple[jax.Array, jax.Array],
    layer: int,
    workspace: jax.Array,
    eps: float,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """`layer_products` of a model's stacks: of q, k and v, of o, gate, up and down.

    norms   float32 [L, hidden], gammas before attention and before the feed-forward
    Returns x and the next layer's q, k and v, or None behind the last, and the workspace.
    """
    qkv, o, gate, up, down = stacks
    of_phases = [((o, layer),), ((gate, layer), (up, layer)), ((down, layer),)]
    gammas = [None, norms[1][layer : layer + 1], None]
    if layer + 1 < len(qkv.where):
        of_phases.append(((qkv, layer + 1),))
        gammas.append(norms[0][layer + 1 : layer + 2])
    pieces = [list(zip(*(pieces_of(*of) for of in phase), strict=True)) for phase in of_phases]
    kernel = functools.partial(
        layer_products,
        formats_of=tuple(tuple(part[0].format for part in parts) for parts in pieces),
        eps=eps,
        bits=pieces[0][0][0].products.activation_bits,
    )
    weights = tuple(tuple(tuple(w.fields for w in part) for part in parts) for parts in pieces)
    number = jnp.asarray(layer, jnp.int32).reshape(1)
    x, following, workspace = jax.custom_batching.sequential_vmap(kernel)(
        attended, x, weights, tuple(gammas), number, workspace
    )
    return x, None if following is None else following[:, : qkv.shape[0]], workspace


def pieces_of(stack: LayerStack, layer: int) -> list[QTensor]:
    """A layer's matrices, rows below rows, each as a stack of one: XLA makes an offset of that slice."""
    part, index = stack.where[layer]
    held = stack.parts[part]
    pieces = held.pieces if isinstance(held, Rows) else (held,)
    return [piece[index : index + 1] for piece in pieces]


def workspace_words(rows: int, hidden: int, ffn: int) -> int:
    """Of the workspace: x behind o, the feed-forward's hidden vector, and x behind down."""
    return rows * (2 * hidden + ffn)


@functools.partial(jax.jit, static_argnames=("formats_of", "eps", "bits"))
def layer_products(
    attended: jax.Array,
    x: jax.Array,
    weights: tuple[tuple[tuple[Fields, ...], ...], ...],
    norms: tuple[jax.Array | None, ...],
    layer: jax.Array,
    workspace: jax.Array,
    *,
    formats_of: tuple[tuple[str, ...], ...],
    eps: float,
    bits: int = 8,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """x <- x + W_o attended;  x <- x + W_down (silu(W_gate n) * (W_up n)),  n = norm(x);  and of the next
    layer W_qkv norm(x), where there is one.

    attended   float32 [rows, K of o]
    x          float32 [rows, hidden]
    weights    of o, gate and up, down, and next q, k and v or not: of each its parts, rows below rows, of
               these a matrix or, for gate and up, two
    norms      of each, float32 [1, hidden], or None
    layer      int32 [1]: another one, modulo 3, than in the launch before with this workspace
    workspace  int32 [workspace_words], zeros before the first launch
    formats_of  of the parts of each
    bits       8 or 16, to which activations are rounded
    Returns x, the next q, k and v, rows of all parts, float32 [rows, N], or None, and the workspace.
    """
    rows, hidden = x.shape
    phases = [Phase(parts, of) for parts, of in zip(weights, formats_of, strict=True)]
    planned = plan(phases, rows, bits, eps)
    if planned is None:
        raise NotImplementedError(
            f"layer_products: {rows} rows of {bits} bits leave no room in {device.shared_bytes()} bytes of "
            "shared memory; split the rows"
        )
    products, warps = planned.products, planned.products[0].plan.warps
    results = {"x_out_gmem": jax.ShapeDtypeStruct((rows, hidden), jnp.float32)}
    if len(products) == 4:
        results["qkv_gmem"] = jax.ShapeDtypeStruct((rows, products[3].n_tiles * ROWS), jnp.float32)
    ref = jax.new_ref(workspace)
    ring_words = warps * planned.depth * planned.slot_bytes // 4
    out = launch(
        functools.partial(_body, planned),
        {
            "weight_gmem": weights, "attended_gmem": attended, "x_gmem": x, "norm_gmem": norms,
            "layer_gmem": layer, "workspace": ref,
        },
        results,
        name="layer_products",
        blocks=max(sum(part.blocks for part in product.plan.parts) for product in products),
        threads=32 * warps,
        scratch={"ring_smem": plgpu.SMEM((ring_words,), jnp.int32), **scratch(products)},
    )  # fmt: skip
    x, qkv = out if len(products) == 4 else (out, None)
    return x, qkv, jax.freeze(ref)


def _body(
    planned: Planned, *, weight_gmem, attended_gmem, x_gmem, norm_gmem, layer_gmem, workspace, x_out_gmem,
    ring_smem, qkv_gmem=None, **refs,
):  # fmt: skip
    """Of a block, whose parts its number says."""
    products = planned.products
    rows, hidden, ffn = products[0].rows, products[1].columns, products[2].columns
    tag = memory.load(layer_gmem, 0) % 3 + 1
    begins = (0, rows * hidden, rows * (hidden + ffn))
    widths = (hidden, ffn, hidden)
    shares = [
        [Share.of(part, product.steps, product.plan.warps) for part in product.plan.parts]
        for product in products
    ]
    ring = Ring(
        [
            [Stream(share, of_part, integer(0)) for share, of_part in zip(of, parts, strict=True)]
            for of, parts in zip(shares, weight_gmem, strict=True)
        ],
        ring_smem, planned.depth, planned.slot_bytes,
    )  # fmt: skip

    def receive(vector: int, places: list) -> list[list]:
        """8 float32 from each (row, column) of a vector on, when they are there."""
        starts = [at + (row * widths[vector] + begins[vector]) for row, at in places]
        words = memory.load_tagged(workspace, [((at, more), 4) for at in starts for more in (0, 4)], tag)
        return [words[k : k + 8] for k in range(0, len(words), 8)]

    def send(y, vector: int, row, n):
        memory.store_tagged(y, workspace, row * widths[vector] + begins[vector] + n, tag)

    def store(number: int, y, row, n):
        if number in (0, 2):
            memory.store(y, x_out_gmem, row, n)
        if number == 3:
            memory.store(y, qkv_gmem, row, n)
        elif number + 1 < len(products):
            send(y, number, row, n)

    residuals = {
        0: functools.partial(memory.load, x_gmem),
        # Of this block's own threads, past a cache that is not kept up to date.
        2: lambda row, n: memory.load_written_by_others(x_out_gmem, row * hidden + n),
    }
    loads = [functools.partial(eights, attended_gmem)]
    loads += [functools.partial(receive, vector) for vector in range(len(products) - 1)]
    blocks = [
        [
            Block(
                product, share, functools.partial(store, number), residuals.get(number), loads[number],
                gamma_gmem=norm_gmem[number], norm_layer=integer(0), **refs,
            )
            for share in shares[number]
        ]
        for number, product in enumerate(products)
    ]  # fmt: skip
    (first,), *_ = blocks
    loaded = first.load()  # before the weights: it is near and wanted first
    state = ring.filled()
    for number, of in enumerate(blocks):
        for block in of:

            def run(block=block, state=state, number=number):
                return block.run(block.load() if number else loaded, ring, state, number)

            state = lanes.choose(block.share.here, run, state)
    memory.wait_copies(0)
