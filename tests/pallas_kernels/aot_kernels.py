"""Kernels, and the shapes of their arguments in models that people run: what compile tests compile.

Each function gives (f, arguments) for `aot.compile_for_gpu`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import SILU, LowRank, Products, QTensor, cache_layouts, delta, device, formats, host_masks
from pallas_kernels.attention import prefill_heads, prefill_pages
from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.attention.scores import PLAIN
from pallas_kernels.delta import chunks, inputs, step
from pallas_kernels.experts import choice as choices
from pallas_kernels.experts import grouped, router_logits
from pallas_kernels.experts import int_experts as int_experts
from pallas_kernels.latent import empty_latent_workspace
from pallas_kernels.latent.decode import latent_decode
from pallas_kernels.matmul.activations_rotated import activations_rotated
from pallas_kernels.matmul.bit_mma.decode import bit_decode
from pallas_kernels.matmul.bit_mma.decode_b1 import RowByRow
from pallas_kernels.matmul.bit_mma.decode_ring import Ring
from pallas_kernels.matmul.bit_mma.decode_s8 import Rounds
from pallas_kernels.matmul.bit_mma.prefill_sm90 import bit_prefill_sm90
from pallas_kernels.matmul.int_mma.decode import int_decode
from pallas_kernels.matmul.int_mma.dequantize import int_dequantize
from pallas_kernels.matmul.int_mma.prefill_sm90 import int_prefill_sm90
from pallas_kernels.precision import FEW_ROWS, few_rows_bits
from pallas_kernels.problems import Matmul
from pallas_kernels.rotation import Rotation
from pallas_kernels.sampling import Rules
from pallas_kernels.sampling.kernel import draw
from pallas_kernels.selection import choose
from pallas_kernels.step import experts_layers, int_layers, layer_products, layer_products_plan
from pallas_kernels.step.decode_layers import Shapes, decode_layers
from pallas_kernels.step.inputs import StepChanges, StepInputs
from pallas_kernels.step.low_rank_plan import NO_CHANGES


def tiles_of(format, n, k, *lead):
    """Fields of a stack of matrices, as kernels read them."""
    fields = layer_products_plan.tiles_of(format, n, k).items()
    return {name: jax.ShapeDtypeStruct((*lead, *field.shape[1:]), field.dtype) for name, field in fields}


def tiles_of_1_bit(n, k, layers=36):
    """Words and scales of 1-bit matrices."""
    words = jax.ShapeDtypeStruct((layers, n // 16, k // 256, 32, 4), jnp.uint32)
    return words, jax.ShapeDtypeStruct((layers, n // 16, k // 128, 8), jnp.uint32)


def product(n, k, matrices, rows, layers=36, bits=8):
    gamma = jax.ShapeDtypeStruct((layers, k), jnp.float32) if matrices == 2 or layers == 1 else None
    chosen = choose(Matmul(device.platform(), "q1_0", n, k, matrices=matrices, bits=bits), rows)
    kernel = {kernel.name: kernel for kernel in (RowByRow, Rounds, Ring)}[chosen]
    f = functools.partial(bit_decode, kernel=kernel, n=n, eps=1e-6, bits=bits)
    x, index = jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    return f, (x, (tiles_of_1_bit(n, k, layers),) * matrices, index, gamma)


def pages_of(layout, *shape):
    return jax.eval_shape(lambda: cache_layouts.empty(layout, shape))


def attention(
    heads, kv_heads, head_dim, normed, layout="bfloat16", rows=1, pairs=None, gated=False, scores=PLAIN,
    sinks=False, tokens=1, integers=False,
):  # fmt: skip
    """integers: as layer_gemms has it, with q, k and v in two parts, and a cache of more than 2^32 numbers,
    whose addresses take more registers."""
    f32, i32, pages = jnp.float32, jnp.int32, 40
    cache = pages_of(layout, 4, 2**15 if integers else pages, 64, kv_heads, head_dim)
    angle = jax.ShapeDtypeStruct((rows, pairs or head_dim // 2), f32)
    gamma = jax.ShapeDtypeStruct((4, head_dim), f32)
    rest = {"eps": 1e-6, "interleaved": not normed, "gated": gated, "scores": scores, "tokens": tokens}
    rest["integers"] = integers
    qkv = jax.ShapeDtypeStruct((rows, ((1 + gated) * heads + 2 * kv_heads) * head_dim), f32)
    return lambda *arrays: decode_attention(*arrays[:-1], **rest, sinks=arrays[-1]), (
        (jax.ShapeDtypeStruct((2, *qkv.shape), f32),) if integers else qkv, cache, cache,
        jax.ShapeDtypeStruct((rows, pages), i32), jax.ShapeDtypeStruct((rows,), i32),
        jax.ShapeDtypeStruct((), i32), angle, angle, (gamma, gamma) if normed else None, None,
        jax.ShapeDtypeStruct((4, heads), f32) if sinks else None,
    )  # fmt: skip


def delta_step(rows, gates_made=False, tokens=1, layers=1, stores=True, dtype=jnp.float32):
    """That of Bonsai 27B. With several layers it is the launch that stores accepted tokens in all of them."""
    heads, dim, channels, hidden = 48, 128, 10240, 5120
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    gates = delta.Gates(
        shape(layers, rows, tokens, hidden), shape(3, hidden), shape(3, 2 * heads, hidden, dtype=jnp.bfloat16)
    )
    gates = shape(layers, rows, tokens, 2 * heads) if gates_made else gates
    weights = {"conv": shape(3, channels, 4), "norm": shape(3, dim)}
    weights |= dict.fromkeys(("decay", "dt"), shape(3, heads))
    return functools.partial(step.delta_step, eps=1e-6, grouped=False, stores=stores), (
        shape(layers, rows, tokens, channels + heads * dim), gates,
        shape(3, rows, heads, dim, dim, dtype=dtype),
        shape(3, rows, 4, channels), shape(rows, tokens, dtype=jnp.int32), shape(dtype=jnp.int32), weights,
    )  # fmt: skip


def delta_chunks(tokens, rows=1, dtype=jnp.float32):
    """As Bonsai 27B has it."""
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    gate = shape(rows, tokens, 48)
    return functools.partial(chunks.delta_chunks, grouped=False), (
        shape(rows, tokens, 2, 16, 128), shape(rows, tokens, 48, 128), gate, gate,
        shape(3, rows, 48, 128, 128, dtype=dtype), shape(dtype=jnp.int32), shape(rows, dtype=bool),
    )  # fmt: skip


def delta_inputs(tokens, rows=1):
    """Likewise."""
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    return functools.partial(inputs.delta_inputs, k_heads=16, k_dim=128, eps=1e-6), (
        shape(rows, tokens, 10240 + 6144), shape(3, rows, 4, 10240), shape(rows, tokens, dtype=jnp.int32),
        shape(dtype=jnp.int32), shape(3, 10240, 4),
    )  # fmt: skip


def many_rows(n, k, matrices, rows, bits=8, format="q1_0"):
    weights = (tiles_of_1_bit(n, k),) * matrices
    if format != "q1_0":
        fields = tiles_of(format, n, k, 36)
        weights = ((fields["words"], fields["d"]),) * matrices
    shape = (bits // 8, 4 * -(-k // 512), rows + -rows % (64 if rows > 64 else 16))
    q, scale = jax.ShapeDtypeStruct((*shape, 128), jnp.int8), jax.ShapeDtypeStruct(shape, jnp.float32)
    residual = jax.ShapeDtypeStruct((rows, n), jnp.float32) if matrices == 1 else None

    def f(q, scale, weights, layer, residual):
        return bit_prefill_sm90(q, scale, weights, layer, n, residual)

    return f, (q, scale, weights, jax.ShapeDtypeStruct((), jnp.int32), residual)


def many_rows_of_integers(format, n, k, matrices, rows, activation=SILU):
    fields = tiles_of(format, n, k, 3)
    residual = jax.ShapeDtypeStruct((rows, n), jnp.float32) if matrices == 1 and n == 4096 else None

    def f(a, scale, weights, layer, residual):
        return int_prefill_sm90(a, scale, weights, layer, n, residual, format=format, activation=activation)

    whole = rows + -rows % 8
    a, scale = jax.ShapeDtypeStruct((whole, k), jnp.float16), jax.ShapeDtypeStruct((whole,), jnp.float32)
    return f, (a, scale, (fields,) * matrices, jax.ShapeDtypeStruct((), jnp.int32), residual)


def seen_pages(layout, window=None):
    cache, i32 = pages_of(layout, 4, 40, 64, 8, 128), jnp.int32
    rows = jax.ShapeDtypeStruct((2, 20), i32), jax.ShapeDtypeStruct((2, 128), i32)
    return functools.partial(prefill_pages.as_float16, window=window), (
        cache,
        cache,
        *rows,
        jax.ShapeDtypeStruct((), i32),
    )


def heads_of_prompts(heads, kv_heads, head_dim, layout, normed=True, gated=False, pairs=None):
    rows, tokens, pages, f32, i32 = 2, 128, 40, jnp.float32, jnp.int32
    cache = pages_of(layout, 4, pages, 64, kv_heads, head_dim)
    shape = jax.ShapeDtypeStruct
    angle = shape((rows, tokens, pairs or head_dim // 2), f32)
    rest = {"eps": 1e-6, "interleaved": not normed, "gated": gated, "scores": PLAIN}
    return functools.partial(prefill_heads.prefill_heads, **rest), (
        shape((rows, tokens, ((1 + gated) * heads + 2 * kv_heads) * head_dim), f32), cache, cache,
        shape((rows, pages), i32), shape((rows, tokens), i32), shape((), i32), angle, angle,
        (shape((4, head_dim), f32),) * 2 if normed else None,
    )  # fmt: skip


def many_queries(
    kernel, heads, kv_heads, head_dim, tokens, layout="bfloat16", scores=PLAIN, sinks=False, values=None
):
    i32, pages = jnp.int32, 40
    caches = [pages_of(layout, 4, pages, 64, kv_heads, width) for width in (head_dim, values or head_dim)]
    return lambda *arrays: kernel(*arrays[:-1], scores=scores, sinks=arrays[-1]), (
        jax.ShapeDtypeStruct((1, tokens, heads, head_dim), jnp.float32), *caches,
        jax.ShapeDtypeStruct((1, pages), i32), jax.ShapeDtypeStruct((1, tokens), i32),
        jax.ShapeDtypeStruct((), i32), jax.ShapeDtypeStruct((heads,), jnp.float32) if sinks else None,
    )  # fmt: skip


def latent(heads, pages, rows=1, layout="float16", nope=192):
    """A decode step's latent attention, of 512 numbers and 64 that turn."""
    real = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    cache = pages_of(layout, 4, rows * pages, 64, 1, 576)
    workspace = jax.eval_shape(lambda: empty_latent_workspace(rows, heads, cache, jnp.zeros((rows, pages))))
    return functools.partial(latent_decode, interleaved=True, eps=1e-6, scale=0.1), (
        real(rows, heads, 512), real(rows, heads, nope + 64), real(rows, 768 + 576), cache,
        number(rows, pages), number(rows), number(), (real(rows, 32),) * 2, real(4, 512), workspace,
    )  # fmt: skip


def integers(format, n, k, matrices, rows, bits=8, folded=False, heads=None, rounded=False, activation=SILU):
    """As `product`, for formats of the integer kernel; without an index, as in a decode step. rounded: of
    activations in groups of 32 that another launch has rounded."""
    rotation = rotation_of(k, heads) if folded else None
    fields = tiles_of(format, n, k, 1)
    gamma = jax.ShapeDtypeStruct((1, k), jnp.float32) if matrices == 2 else None
    residual = jax.ShapeDtypeStruct((rows, n + -n % 16), jnp.float32) if matrices == 1 else None

    def f(x, weights, gamma, residual, rotation):
        return int_decode(
            x, (weights,), None, formats_of=(format,), gamma=gamma, eps=1e-6, residual=residual,
            rotation=rotation, activation=activation, activation_bits=bits, n=n,
        )  # fmt: skip

    x = jax.ShapeDtypeStruct((rows, k), jnp.float32)
    x = {32: jax.ShapeDtypeStruct((rows, k // 2), jnp.int32)} if rounded else x
    return f, (x, (fields,) * matrices, gamma, residual, rotation)


def dequantized(formats_of, n, k):
    """Matrices of one layer to float16, rows below rows; the layer is traced."""
    kinds = tuple((((format, n),),) for format in formats_of)
    f = lambda weights, places: int_dequantize(weights, places, kinds=kinds, columns=k)  # noqa: E731
    places = jax.ShapeDtypeStruct((len(formats_of), 2), jnp.int32)
    return f, (tuple(((tiles_of(format, n, k, 3),),) for format in formats_of), places)


def token(rows, vocabulary):
    """The next token of each row."""
    columns = {name: jax.ShapeDtypeStruct((rows,), jnp.float32) for name in Rules._fields[:8]}
    columns |= {
        name: jax.ShapeDtypeStruct((rows,), dtype)
        for name, dtype in (("top_k", jnp.int32), ("temperature_first", bool))
    }
    tables = [jax.ShapeDtypeStruct((rows, vocabulary), dtype) for dtype in (jnp.float32, bool, jnp.int32)]
    biases = [jax.ShapeDtypeStruct((rows, 1), dtype) for dtype in (jnp.int32, jnp.float32)]
    keys, positions = jax.ShapeDtypeStruct((rows, 2), jnp.uint32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    logits, seen, counts = tables
    rules = Rules(**columns, bias_ids=biases[0], bias=biases[1], seen=seen, counts=counts, table=positions)
    return draw, (logits, rules, keys, positions)


def masks_of_the_host(rows, vocabulary):
    receive = functools.partial(host_masks.receive, words=-(-vocabulary // 32))
    shapes = [((2,), jnp.int32), ((rows,), jnp.int32), ((rows,), bool)]
    return receive, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def of_rows(f, rows, k, normed=True, **options):
    x, layer = jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    arguments = (x, jax.ShapeDtypeStruct((36, k), jnp.float32), layer) if normed else (x,)
    return functools.partial(f, eps=1e-6, **options), arguments


def rotated(rows, k, normed=True, heads=None, **options):
    """A row as Bonsai 2 27B has it."""
    f, (x, *norm) = of_rows(activations_rotated, rows, k, normed, **options)
    return f, (x, rotation_of(k, heads), *norm)


def rotation_of(k, heads=None):
    return jax.eval_shape(lambda: Rotation.from_signs(np.ones(k), 1024, heads))


def one_launch(
    layers, hidden, ffn, heads, kv_heads, head_dim, rows=1, bits=8, layout="bfloat16", rank=0,
    dtype=jnp.float32, tokens=1,
):  # fmt: skip
    """All layers of a step, as a Bonsai model has them; with a rank, beside changes of all matrices. The
    cache is one of an engine, of more than 2^32 numbers, whose addresses take more registers."""
    f32, i32, pages = jnp.float32, jnp.int32, 34

    def matrix(n, k):
        shape = (layers, -(-n // 16), -(-k // 256))
        scales = (layers, -(-n // 16), 2 * -(-k // 256), 8)
        return jax.ShapeDtypeStruct((*shape, 32, 4), jnp.uint32), jax.ShapeDtypeStruct(scales, jnp.uint32)

    width, kv_width = heads * head_dim, kv_heads * head_dim
    sizes = [(width + 2 * kv_width, hidden), (hidden, width), (ffn, hidden), (ffn, hidden), (hidden, ffn)]
    vector = lambda *shape, dtype=f32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    cache = pages_of(layout, layers, 2**13, 64, kv_heads, head_dim)

    def change(n, k, start=0):
        return LowRank(vector(layers, rank, k, dtype=dtype), vector(layers, n, rank, dtype=dtype), 2.0, start)

    changes, beside = NO_CHANGES, None
    if rank:
        qkv = [(width, hidden), (kv_width, hidden, width), (kv_width, hidden, width + kv_width)]
        beside = StepChanges(
            (tuple(change(*size) for size in qkv), *((change(*size),) for size in sizes[1:]))
        )
        changes = beside.sizes
    down_bits = few_rows_bits(device.platform(), "q1_0", bits) if rows <= FEW_ROWS else bits
    shapes = Shapes(
        rows, hidden, ffn, heads, kv_heads, head_dim, blocks=device.multiprocessors(), bits=bits,
        down_bits=down_bits, eps=1e-6, changes=changes, tokens=tokens,
    )  # fmt: skip
    return functools.partial(decode_layers, shapes=shapes, interleaved=False), (
        vector(rows, hidden), tuple(matrix(*size) for size in sizes),
        StepInputs(
            *(vector(layers, hidden),) * 2, None, (vector(layers, head_dim),) * 2,
            (vector(rows, head_dim // 2),) * 2, cache, cache, vector(rows, pages, dtype=i32),
            vector(rows, dtype=i32),
        ), beside,
    )  # fmt: skip


def products_between(
    o, gate_up, down, qkv, rows=1, bits=8, width=4096, hidden=4096, ffn=12288, folded=False, post_norms=False,
    activation=SILU,
):  # fmt: skip
    """The products between two layers' attention, as a Bonsai 8B has them: formats, and (format, rows) of the
    parts of the next q, k and v. What o, and gate and up make is passed on as integers, where it may be. For
    1-bit weights it may not; all or none of these are of 1 bit."""
    sizes = [([(o, hidden)], width, 1), ([(gate_up, ffn)], hidden, 2), ([(down, hidden)], ffn, 1)]
    sizes += [(qkv, hidden, 1)] * bool(qkv)
    weights = tuple(
        tuple((tiles_of(format, n, k, 1),) * matrices for format, n in parts) for parts, k, matrices in sizes
    )
    formats_of = tuple(tuple(format for format, _ in parts) for parts, _, _ in sizes)
    vector = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    norms = (None, vector(1, hidden), None, vector(1, hidden))[: len(weights)]
    down_bits = few_rows_bits(device.platform(), down, bits)
    workspace = vector(layer_products.workspace_words(rows, hidden, ffn), dtype=jnp.int32)
    integers = rows == 1 and bits == 8 and not folded and formats.family(o) == "int"
    rounded = integers and not post_norms, integers, False
    f = functools.partial(
        layer_products.layer_products, formats_of=formats_of, eps=1e-6, bits=(bits, bits, down_bits, bits),
        rounded=rounded, activation=activation,
    )  # fmt: skip
    number, heads = vector(1, dtype=jnp.int32), ((3, 16), None, None, None)
    rotations = tuple(
        rotation_of(k, of) if folded else None for (_, k, _), of in zip(sizes, heads, strict=False)
    )
    after = (vector(1, hidden),) * 2 if post_norms else None
    return f, (vector(rows, width), vector(rows, hidden), weights, norms, number, workspace, rotations, after)


def one_launch_of_experts(layers, down, qkv, layout="bfloat16", rows=1):
    """All layers of a step of Qwen3-30B-A3B: for each combination of formats that layers have, that of down,
    and the parts of q, k and v."""
    hidden, q, ffn, pages, experts = 2048, 4096, 768, 34, experts_layers.Experts(128, 8, True)

    def stacks(combinations, k, matrices=1, of=1):
        stack = lambda format, n: tiles_of(format, n, k, layers // len(combinations) * of)  # noqa: E731
        return tuple(tuple((stack(*part),) * matrices for part in parts) for parts in combinations)

    combinations = [[[("q4_k", hidden)]], [[("q4_k", ffn)]], [[(format, hidden)] for format in down], qkv]
    weights = tuple(
        stacks(of, *sizes)
        for of, sizes in zip(combinations, [(q,), (hidden, 2, 128), (ffn, 1, 128), (hidden,)], strict=True)
    )
    f = functools.partial(
        experts_layers.experts_layers, experts=experts, eps=1e-6, interleaved=False,
        formats_of=tuple(tuple(tuple(f for f, _ in parts) for parts in each) for each in combinations),
    )  # fmt: skip
    vectors, inputs = _of_rows(rows, layers, hidden, (32, 4, 128), pages, layout)
    return f, (*vectors, weights, _where(layers), _vector(layers, 128, hidden), inputs)


def one_launch_of_integers(
    layers, o, gate_up, down, qkv, hidden=4096, ffn=12288, heads=(32, 8, 128), layout="bfloat16", bits=8,
    rows=1, tokens=1,
):  # fmt: skip
    """All layers of a step of the 8B, or of another model: formats of o, of gate and up, and, for each
    combination that layers have, of down, and the parts of q, k and v."""

    def stacks(combinations, k, matrices=1):
        stack = lambda format, n: tiles_of(format, n, k, layers // len(combinations))  # noqa: E731
        return tuple(tuple((stack(*part),) * matrices for part in parts) for parts in combinations)

    combinations = [[[(o, hidden)]], [[(gate_up, ffn)]], [[(format, hidden)] for format in down], qkv]
    sizes = [(heads[0] * heads[2],), (hidden, 2), (ffn,), (hidden,)]
    weights = tuple(stacks(of, *each) for of, each in zip(combinations, sizes, strict=True))
    f = functools.partial(
        int_layers.int_layers, eps=1e-6, interleaved=False, bits=bits, rounded=(bits == 8,) * 3,
        tokens=tokens,
        formats_of=tuple(tuple(tuple(f for f, _ in parts) for parts in each) for each in combinations),
    )  # fmt: skip
    vectors, inputs = _of_rows(rows, layers, hidden, heads, 34, layout)
    return f, (*vectors, weights, _where(layers), inputs)


def _vector(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _where(layers):
    """The combination and the place of each product's matrices, by layer."""
    return _vector(4, layers, 2, dtype=jnp.int32)


def _of_rows(rows, layers, hidden, heads, pages, layout):
    """q, k and v of all rows, their x, and the StepInputs, in which each row has so many pages."""
    query_heads, kv_heads, head_dim = heads
    cache = pages_of(layout, layers, pages, 64, kv_heads, head_dim)
    width = (query_heads + 2 * kv_heads) * head_dim
    return (_vector(rows, width), _vector(rows, hidden)), StepInputs(
        *(_vector(layers, hidden),) * 2, None, (_vector(layers, head_dim),) * 2,
        (_vector(rows, head_dim // 2),) * 2, cache, cache, _vector(rows, pages, dtype=jnp.int32),
        _vector(rows, dtype=jnp.int32),
    )  # fmt: skip


def experts(format, n, k, matrices, tiles, rows, shared=False):
    """Products by expert as Qwen3-30B-A3B has them, of so many tiles; shared: one more expert, in stacks
    of its own."""
    arguments = (
        jax.ShapeDtypeStruct((tiles * rows, k), jnp.float32),
        (tiles_of(format, n, k, 48 * 128),) * matrices,
        jax.ShapeDtypeStruct((tiles,), jnp.int32),
        jax.ShapeDtypeStruct((tiles, rows), jnp.int32),
        (jax.ShapeDtypeStruct((1,), jnp.int32),) * (1 + shared),
        (tiles_of(format, n, k, 48),) * matrices if shared else None,
    )
    return functools.partial(int_experts.int_experts, count=128, format=format), arguments


def choosing_experts(format, n, k, tokens):
    """Gate and up of Qwen3.6-35B-A3B, with the shared expert."""
    fields = (tiles_of(format, n, k, 40 * 256),) * 2
    x, place = jax.ShapeDtypeStruct((tokens, k), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    choice = choices.Choice(choices.Experts(256, 8, True), with_shared=True)
    (given,) = choice_of_experts(256, 8, tokens, with_shared=True)[1]
    f = functools.partial(int_experts.choosing_experts, choice=choice, format=format)
    return f, (x, fields, given, (place, place), (tiles_of(format, n, k, 40),) * 2)


def choice_of_experts(count, used, tokens, rules=choices.PLAIN, biased=False, with_shared=False):
    vector = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    choice = choices.Choice(choices.Experts(count, used, True), rules, with_shared)
    biases = (vector(40, count), vector(1, dtype=jnp.int32)) if biased else (None, None)
    shared = vector(tokens) if with_shared else None
    given = choices.Logits(vector(tokens, count), vector(tokens, dtype=jnp.int32), *biases, shared)
    return functools.partial(choices.route, choice=choice), (given,)


def logits_of_router(count, hidden, tokens, dtype=jnp.float32, biased=False):
    """With a shared expert's row."""
    vector = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    return functools.partial(router_logits.router_logits, eps=1e-6), (
        vector(tokens, hidden), vector(40, hidden), vector(40, count, hidden, dtype=dtype),
        vector(40, count) if biased else None, vector(40, hidden), (vector(1, dtype=jnp.int32),) * 2,
    )  # fmt: skip


def stack_of_experts(format, n, k, lead=(48, 128), products=None):
    fields = tiles_of(format, n, k, *lead)
    return QTensor(fields, format, (n, k), tiled=True, products=products or Products())


def experts_of_prefill(format, tokens):
    """A layer's, of Qwen3-30B-A3B: down is in this format."""
    stack, of_token = stack_of_experts, functools.partial(jax.ShapeDtypeStruct, (tokens, 8))
    return grouped.feed_forward, (
        jax.ShapeDtypeStruct((tokens, 2048), jnp.float32),
        (stack("q4_k", 768, 2048), stack("q4_k", 768, 2048), stack(format, 2048, 768)),
        *(of_token(jnp.int32), of_token(jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)),
    )
