"""All products between what mixes tokens in a layer, attention or a delta net, and that of the next in one
launch, a block on each multiprocessor, for weights of 2 to 8 bits.

    mixed -> [o, + x] -> x -> [norm, gate, up, activation] -> [down, + x] -> x -> [norm, next q, k, v]

Each [phase] is a product of decode.py, with its block and its order of sums. A launch that does only one
has an idle memory at both ends: until its first weights are there, and while its last sums are made and the
next one starts. Here a warp's ring runs on from phase to phase (decode_ring.py): weights are on their way
while activations go from block to block (gpu/exchange.py). Every block reads all of them at once, and waits,
so their bytes count: where all parts of what follows want the same integers, the block that made them rounds
them, and 8 are passed on in 16 bytes. Otherwise, and where weights are folded and each block rotates for
itself, they travel as float32 with 22 bits of mantissa. The residual stream stays exact with the block that
adds to it, which has the same outputs of o and of down.

All blocks must run at once.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange, tag
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer
from pallas_kernels.matmul.int_mma.activations_shared import eights, rounded_words
from pallas_kernels.matmul.int_mma.decode_block import Block, scratch
from pallas_kernels.matmul.int_mma.decode_ring import Ring, Share, Stream
from pallas_kernels.qtensor import LayerStack, QTensor, leaves
from pallas_kernels.rotation import Rotation
from pallas_kernels.step.layer_products_plan import Fields, Phase, Planned, plan, rotated_words
from pallas_kernels.tiles import TILE_ROWS


class OfLayer(NamedTuple):
    """A weight of a layer, or gamma of a norm: the stack and the index into it."""

    stack: Any
    index: int

    @property
    def gamma(self) -> jax.Array:
        return self.stack[self.index : self.index + 1]

    def pieces(self) -> list[QTensor]:
        """The layer's matrices, rows below rows, each a stack of one: XLA makes an offset of that slice."""
        part, index = self.stack.where[self.index]
        return [piece[index : index + 1] for piece in leaves(self.stack.parts[part])]


def run(
    mixed: jax.Array,
    x: jax.Array,
    o: OfLayer,
    ffn: tuple[OfLayer, OfLayer, OfLayer, OfLayer],
    following: tuple[OfLayer, OfLayer] | None,
    layer: int,
    workspace: jax.Array,
    eps: float,
    rounded: tuple[bool, bool, bool],
    activation: Activation = SILU,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """`layer_products` of a model's stacks.

    ffn        its norm, gate, up and down
    following  the next layer's norm, and q, k and v or what a delta net has in their place; None behind the
               last layer
    rounded    `rounded_vectors` of the model
    Returns x and what the following product gives, or None, and the workspace.
    """
    norm, gate, up, down = ffn
    stacks, gammas = [(o,), (gate, up), (down,)], [None, norm.gamma, None]
    if following is not None:
        stacks.append(following[1:])
        gammas.append(following[0].gamma)
    pieces = [list(zip(*(weight.pieces() for weight in phase), strict=True)) for phase in stacks]
    kernel = functools.partial(
        layer_products,
        formats_of=tuple(tuple(part[0].format for part in parts) for parts in pieces),
        eps=eps,
        bits=pieces[0][0][0].products.activation_bits,
        rounded=rounded,
        activation=activation,
    )
    weights = tuple(tuple(tuple(w.fields for w in part) for part in parts) for parts in pieces)
    rotations = tuple(parts[0][0].rotation for parts in pieces)
    number = jnp.asarray(layer, jnp.int32).reshape(1)
    x, made, workspace = jax.custom_batching.sequential_vmap(kernel)(
        mixed, x, weights, tuple(gammas), number, workspace, rotations
    )
    return x, None if following is None else made[:, : following[1].stack.shape[0]], workspace


def rounded_vectors(
    outputs: Sequence[LayerStack],
    ffn: tuple[LayerStack, LayerStack, LayerStack],
    inputs: Sequence[LayerStack],
    rows: int,
) -> tuple[bool, bool, bool]:
    """Which of the vectors that go from block to block are passed on as integers: what o, gate and up, and
    down make. In all layers or in none, since a tag tells a layer from the two before only.

    outputs  of each kind of mixer, attention or delta net, all of the model's o
    ffn      gate, up and down
    inputs   of each kind q, k and v, or what a delta net has in their place
    """
    gate, up, down = ffn
    return (
        _is_rounded(outputs, (gate, up), rows),
        _is_rounded((gate,), (down,), rows),
        _is_rounded((down,), inputs, rows),
    )


def _is_rounded(makers: Sequence[LayerStack], users: Sequence[LayerStack], rows: int) -> bool:
    """Of one row, of 8 bits that are not rotated, where every block makes whole groups of 32 and all parts of
    what follows have the same groups."""
    tiles = [-(-maker.shape[0] // TILE_ROWS) for maker in makers]
    block_tiles = [-(-n_tiles // device.multiprocessors()) for n_tiles in tiles]
    groups = [
        {formats.get(piece.format).LANES.activation_group for piece in leaves(part)}
        for user in users
        for part in user.parts
    ]
    return (
        rows == 1
        and all(w.products.activation_bits == 8 and w.rotation is None for w in leaves(users))
        and all(n % 2 == 0 for n in (*tiles, *block_tiles))
        and all(len(leaves(part)) == 1 for maker in makers for part in maker.parts)
        and all(len(part_groups) == 1 for part_groups in groups)
    )


def workspace_words(rows: int, hidden: int, ffn: int) -> int:
    """Of the workspace: x behind o, the feed-forward's hidden vector, and x behind down."""
    return rows * (2 * hidden + ffn)


@functools.partial(jax.jit, static_argnames=("formats_of", "eps", "bits", "rounded", "activation"))
def layer_products(
    attended: jax.Array,
    x: jax.Array,
    weights: tuple[tuple[tuple[Fields, ...], ...], ...],
    norms: tuple[jax.Array | None, ...],
    layer: jax.Array,
    workspace: jax.Array,
    rotations: tuple[Rotation | None, ...] | None = None,
    *,
    formats_of: tuple[tuple[str, ...], ...],
    eps: float,
    bits: int = 8,
    rounded: tuple[bool, bool, bool] = (False, False, False),
    activation: Activation = SILU,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """x <- x + W_o attended;  x <- x + W_down activation(W_gate n, W_up n),  n = norm(x);  and of the
    next layer W_qkv norm(x), where there is one.

    attended   float32 [rows, K of o]
    x          float32 [rows, hidden]
    weights    of o, gate and up, down, and next q, k and v or not: of each its parts, rows below rows, of
               these a matrix or, for gate and up, two
    norms      of each, float32 [1, hidden], or None
    layer      int32 [1]: another one, modulo 3, than in the launch before with this workspace
    workspace  int32 [workspace_words], zeros before the first launch
    rotations  of the inputs of each, all or none; None for none
    formats_of  of the parts of each
    bits       8 or 16, to which activations are rounded
    rounded    whether what o, gate and up, and down make is passed on as integers (`rounded_vectors`)
    Returns x, the next q, k and v, rows of all parts, float32 [rows, N], or None, and the workspace.
    """
    rows, hidden = x.shape
    phases = [Phase(*phase) for phase in zip(weights, formats_of, strict=True)]
    rotations = (None,) * len(phases) if rotations is None else rotations
    rotated = rotations[0] is not None
    planned = plan(phases, rows, bits, eps, rotated, activation)
    if planned is None:
        raise NotImplementedError(
            f"layer_products: {rows} rows of {bits} bits leave no room in {device.shared_bytes()} bytes of "
            "shared memory; split the rows"
        )
    products, warps = planned.products, planned.products[0].plan.warps
    results = {"x_out_gmem": jax.ShapeDtypeStruct((rows, hidden), jnp.float32)}
    if len(products) == 4:
        results["qkv_gmem"] = jax.ShapeDtypeStruct((rows, products[3].n_tiles * TILE_ROWS), jnp.float32)
    ref = jax.new_ref(workspace)
    ring_words = warps * planned.depth * planned.slot_bytes // 4
    smem = scratch(products)
    if rotated:
        smem["rotated_smem"] = plgpu.SMEM((rotated_words(phases, rows, warps),), jnp.float32)
    out = launch(
        functools.partial(_body, planned, rounded, [r and (r.block, r.heads) for r in rotations]),
        {
            "weight_gmem": weights, "attended_gmem": attended, "x_gmem": x, "norm_gmem": norms,
            "flips_gmem": tuple(r and r.flips for r in rotations), "layer_gmem": layer, "workspace": ref,
        },
        results,
        name="layer_products",
        blocks=max(sum(part.blocks for part in product.plan.parts) for product in products),
        threads=32 * warps,
        scratch={"ring_smem": plgpu.SMEM((ring_words,), jnp.int32), **smem},
    )  # fmt: skip
    x, qkv = out if len(products) == 4 else (out, None)
    return x, qkv, jax.freeze(ref)


def _body(
    planned: Planned, rounded: tuple[bool, ...], rotations: list, *, weight_gmem, attended_gmem, x_gmem,
    norm_gmem, flips_gmem, layer_gmem, workspace, x_out_gmem, ring_smem, qkv_gmem=None, rotated_smem=None,
    **refs,
):  # fmt: skip
    """Of a block, whose parts its number says."""
    products = planned.products
    rows, hidden, ffn = products[0].rows, products[1].columns, products[2].columns
    widths = (hidden, ffn, hidden)
    begins = (0, rows * hidden, rows * (hidden + ffn))
    tag_of_layer = tag(memory.load(layer_gmem, 0))
    exchanges = [Exchange(workspace, begin, tag_of_layer) for begin in begins]
    shares = [
        [Share.for_block(part, product.steps, product.plan.warps) for part in product.plan.parts]
        for product in products
    ]
    ring = Ring(
        [
            [Stream(share, part, integer(0)) for share, part in zip(own, parts, strict=True)]
            for own, parts in zip(shares, weight_gmem, strict=True)
        ],
        ring_smem, planned.depth, planned.slot_bytes,
    )  # fmt: skip

    def receive(vector: int, places: list) -> list[list]:
        """Wait for 8 float32 from each (row, column) of a vector on, or words of 8 integers."""
        if rounded[vector]:
            return exchanges[vector].receive_fours([at // 2 for _, at in places])
        return exchanges[vector].receive_eights([(at, row * widths[vector]) for row, at in places])

    def receive_each(vector: int, places: list) -> list:
        """Wait for a float32 from each (row, column) of a vector."""
        return exchanges[vector].receive_each([(at, row * widths[vector]) for row, at in places])

    def send(y, vector: int, row, n, gamma):
        if not rounded[vector]:
            exchanges[vector].send(n, [y], row * widths[vector])
            return
        *words, squares = rounded_words(y, gamma, products[vector + 1].activation_group)
        with lanes.when(lanes.thread() % 8 == 0):
            exchanges[vector].send_four(n // 2, [*words, memory.tagged(squares, tag_of_layer)])

    def store(number: int, y, row, n, gamma):
        if number in (0, 2):
            memory.store(y, x_out_gmem, row, n)
        if number == 3:
            memory.store(y, qkv_gmem, row, n)
        elif number + 1 < len(products):
            send(y, number, row, n, gamma)

    residuals = {
        0: functools.partial(memory.load, x_gmem),
        # Of this block's own threads, past a cache that is not kept up to date.
        2: lambda row, n: memory.load_written_by_others(x_out_gmem, row * hidden + n),
    }

    def gamma_of(number: int, row, n):
        return memory.load(norm_gmem[number], 0, n)

    later = range(len(products) - 1)
    # Of the norm that follows: whoever rounds multiplies by it.
    gammas = {
        number: functools.partial(gamma_of, number + 1)
        for number in later
        if rounded[number] and norm_gmem[number + 1] is not None
    }
    loads = [functools.partial(eights, attended_gmem), *(functools.partial(receive, at) for at in later)]
    rotating: list[dict | None] = [None] * len(products)
    if rotated_smem is not None:
        loads = [functools.partial(memory.load_each, attended_gmem)]
        loads += [functools.partial(receive_each, at) for at in later]
        rotating = [
            {"flips_gmem": flips, "block": block, "heads": heads, "rotated_smem": rotated_smem}
            for flips, (block, heads) in zip(flips_gmem, rotations, strict=True)
        ]
    blocks = [
        [
            Block(
                product, share, functools.partial(store, number), residuals.get(number), loads[number],
                gamma_gmem=norm_gmem[number], norm_layer=integer(0), prefetch=gammas.get(number),
                rounded=number > 0 and rounded[number - 1], rotation=rotating[number], **refs,
            )
            for share in shares[number]
        ]
        for number, product in enumerate(products)
    ]  # fmt: skip
    (first,), *_ = blocks
    loaded = first.load()  # before the weights: it is near and wanted first
    state = ring.filled()
    for number, parts in enumerate(blocks):
        for block in parts:

            def run(block=block, state=state, number=number):
                return block.run(block.load() if number else loaded, ring, state, number)

            state = lanes.choose(block.share.has_tiles, run, state)
    memory.wait_copies(0)
