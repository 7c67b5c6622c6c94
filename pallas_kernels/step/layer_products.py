"""All products between what mixes tokens in a layer, attention or a delta net, and that of the next in one
launch, a block on each multiprocessor, for weights of 1 to 8 bits.

    mixed -> [o, + x] -> x -> [norm, gate, up, activation] -> [down, + x] -> x -> [norm, next q, k, v]

Each [phase] is a product of decode.py, with its block and its order of sums. A launch that does only one
has an idle memory at both ends: until its first weights are there, and while its last sums are made and the
next one starts. Here a warp's ring runs on from phase to phase (decode_ring.py): weights are on their way
while activations go from block to block (gpu/exchange.py). Every block reads all of them at once, and waits,
so their bytes count: where all parts of what follows want the same integers, the block that made them rounds
them, and 8 are passed on in 16 bytes. Otherwise, and where weights are folded and each block rotates for
itself, or are of 1 bit and each block makes planes (decode_planes.py), they travel as float32 with 22 bits of
mantissa. The residual stream stays exact with the block that adds to it, which has the same outputs of o and
of down.

Where norms follow o and down, x + norm(y) needs all of y. Every block reads y, so each makes the sum for
itself before it rounds it (activations_summed.py, layer_products_stream.py):

    mixed -> [o] -> y -> [x + norm(y) = x', norm, gate, up, activation] -> [down] -> z
                                         -> [x' + norm(z), norm, next q, k, v]

x' stays in each block's shared memory; the first block stores what the next launch begins with.

All blocks must run at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange, tag
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer
from pallas_kernels.matmul.int_mma.activations_shared import eights, rounded_words
from pallas_kernels.matmul.int_mma.activations_summed import PostNorm
from pallas_kernels.matmul.int_mma.decode_block import Block, scratch
from pallas_kernels.matmul.int_mma.decode_ring import Ring, Share, Stream
from pallas_kernels.norm import rms_norm
from pallas_kernels.rotation import Rotation
from pallas_kernels.step.layer_products_plan import Fields, Planned, phases_of, plan, rotated_words
from pallas_kernels.step.layer_products_stream import ResidualStream, meet_if_idle, with_idle_blocks
from pallas_kernels.tiles import TILE_ROWS


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
    post_norms: tuple[jax.Array, jax.Array] | None = None,
    scale: jax.Array | None = None,
    *,
    formats_of: tuple[tuple[str, ...], ...],
    eps: float,
    bits: tuple[int, ...] = (8, 8, 8, 8),
    rounded: tuple[bool, bool, bool] = (False, False, False),
    activation: Activation = SILU,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """x <- x + W_o attended;  x <- x + W_down activation(W_gate n, W_up n),  n = norm(x);  and of the
    next layer W_qkv norm(x), where there is one. With post norms, the norm of each product is added.

    attended   float32 [rows, K of o]
    x          float32 [rows, hidden]
    weights    of o, gate and up, down, and next q, k and v or not: of each its parts, rows below rows, of
               these a matrix or, for gate and up, two
    norms      of each, float32 [1, hidden], or None
    layer      int32 [1]: another one, modulo 3, than in the launch before with this workspace
    workspace  int32 [workspace_words], zeros before the first launch
    rotations  of the inputs of each, all or none; None for none
    post_norms  of what o and down make, float32 [1, hidden] each; None for none. Not with rotations
    scale      float32 [1, 1]: with post norms x is multiplied by it in the end; None for 1
    formats_of  of the parts of each
    bits       8 or 16, to which what each reads is rounded
    rounded    whether what o, gate and up, and down make is passed on as integers (`rounded_vectors`)
    Returns x, the next q, k and v, rows of all parts, float32 [rows, N], or None, and the workspace.
    """
    rows, hidden = x.shape
    phases = phases_of(weights, formats_of, attended.shape[1], hidden, bits)
    rotations = (None,) * len(phases) if rotations is None else rotations
    rotated = rotations[0] is not None
    planned = plan(phases, rows, eps, rotated, activation, post_norms is not None)
    if planned is None:
        raise NotImplementedError(
            f"layer_products: {rows} rows of {max(bits)} bits leave no room in {device.shared_bytes()} bytes "
            "of shared memory; split the rows"
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
    if post_norms is not None:
        assert not rotated and not rounded[0] and not rounded[2]
        smem["stream_smem"] = plgpu.SMEM((rows * hidden,), jnp.float32)
        smem["post_squares_smem"] = plgpu.SMEM((rows * warps,), jnp.float32)
        if len(products) == 3:
            results["z_gmem"] = jax.ShapeDtypeStruct((rows, hidden), jnp.float32)
    out = launch(
        functools.partial(_body, planned, rounded, [r and (r.block, r.heads) for r in rotations]),
        {
            "weight_gmem": weights, "attended_gmem": attended, "x_gmem": x, "norm_gmem": norms,
            "post_norm_gmem": post_norms, "scale_gmem": scale,
            "flips_gmem": tuple(r and r.flips for r in rotations), "layer_gmem": layer, "workspace": ref,
        },
        results,
        name="layer_products",
        blocks=max(sum(part.blocks for part in product.plan.parts) for product in products),
        threads=32 * warps,
        scratch={"ring_smem": plgpu.SMEM((ring_words,), jnp.int32), **smem},
    )  # fmt: skip
    if len(products) == 4:
        return *out, jax.freeze(ref)
    if post_norms is not None:  # nobody reads all of what the last down makes
        x, z = out
        out = x + rms_norm(z, post_norms[1][0], eps)
        out = out if scale is None else out * scale
    return out, None, jax.freeze(ref)


def _body(
    planned: Planned, rounded: tuple[bool, ...], rotations: list, *, weight_gmem, attended_gmem, x_gmem,
    norm_gmem, post_norm_gmem, scale_gmem, flips_gmem, layer_gmem, workspace, x_out_gmem, ring_smem,
    qkv_gmem=None, z_gmem=None, rotated_smem=None, stream_smem=None, post_squares_smem=None, **refs,
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
            starts = [(row * widths[vector] + at) // 2 for row, at in places]
            return exchanges[vector].receive_fours(starts)
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
            at = (row * widths[vector] + n) // 2
            exchanges[vector].send_four(at, [*words, memory.tagged(squares, tag_of_layer)])

    def store(number: int, y, row, n, gamma):
        if number in (0, 2) and post_norm_gmem is None:
            memory.store(y, x_out_gmem, row, n)
        if number == 3:
            memory.store(y, qkv_gmem, row, n)
        elif number + 1 < len(products):
            send(y, number, row, n, gamma)
        elif z_gmem is not None:
            memory.store(y, z_gmem, row, n)

    residuals = {
        0: functools.partial(memory.load, x_gmem),
        # Of this block's own threads, past a cache that is not kept up to date.
        2: lambda row, n: memory.load_written_by_others(x_out_gmem, row * hidden + n),
    }
    post_norms: dict[int, PostNorm] = {}
    if post_norm_gmem is not None:
        stream = ResidualStream(
            post_norm_gmem, scale_gmem, x_gmem, x_out_gmem, stream_smem, post_squares_smem, hidden,
            following=len(products) == 4,
        )  # fmt: skip
        residuals, post_norms = {}, {1: stream.after_o, 3: stream.after_down}
        shares[1] = with_idle_blocks(shares[1])

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
                rounded=number > 0 and rounded[number - 1], rotation=rotating[number],
                post_norm=post_norms.get(number), in_groups=number in later and rounded[number], **refs,
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
                state = block.run(block.load() if number else loaded, ring, state, number)
                if number == 1 and post_norms:
                    meet_if_idle(block.share)
                return state

            state = lanes.choose(block.share.has_tiles, run, state)
    memory.wait_copies(0)
