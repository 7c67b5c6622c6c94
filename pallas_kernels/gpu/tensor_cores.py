"""Tensor cores, one instruction each, with the numbers that a lane holds of its operands. Called while a
kernel is traced, as lanes.py is."""

import jax.numpy as jnp

from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import as_real, as_word, f32, i32, integer


def count_common_bits(a0, a1, b, start=0):
    """Binary tensor cores: start + popcounts of a & b over 128 bits, for 16 rows of `a` and 8 columns of `b`.

    mma.m16n8k128 .b1 and.popc. With lane = 4 g + t: a0 and a1 hold word t of rows g and g + 8, b word t of
    column g. Returns for this lane [row g, column 2 t], [g, 2 t + 1], [g + 8, 2 t], [g + 8, 2 t + 1].
    """
    kind = "m16n8k128.row.col.s32.b1.b1.s32.and.popc"
    text = f"mma.sync.aligned.{kind} {{$0,$1,$2,$3}},{{$4,$5}},{{$6}},{{$7,$7,$7,$7}};"
    return lanes.ptx([i32()] * 4, [a0, a1, b, integer(start)], text, "=r,=r,=r,=r,r,r,r,r")


def add_product(c, a, b, operand):
    """Tensor cores: c + a b in float32, for 16 x 16 and 16 x 8 of `operand`: jnp.bfloat16 or jnp.float16.

    mma.m16n8k16. With lane = 4 g + t, pairs of numbers in an i32: a is [row g, columns 2 t and 2 t + 1],
    [row g + 8, the same], [row g, columns 2 t + 8 and 2 t + 9], [row g + 8, the same]; b is [rows 2 t and
    2 t + 1, column g], [rows 2 t + 8 and 2 t + 9, column g]; c as in `count_common_bits`.
    """
    name = {jnp.bfloat16: "bf16", jnp.float16: "f16"}[operand]
    kind = f"m16n8k16.row.col.f32.{name}.{name}.f32"
    text = f"mma.sync.aligned.{kind} {{$0,$1,$2,$3}},{{$4,$5,$6,$7}},{{$8,$9}},{{$10,$11,$12,$13}};"
    return lanes.ptx([f32()] * 4, [*a, *b, *c], text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")


def tf32(x):
    """A float32 with 10 bits of mantissa, to nearest: what `add_product_tf32` multiplies exactly."""
    return as_real(lanes.ptx(i32(), [x], "cvt.rna.tf32.f32 $0, $1;", "=r,f"))


def add_product_tf32(c, a, b):
    """Tensor cores: c + a b in float32, for 16 x 8 and 8 x 8, of which 10 bits of mantissa count (`tf32`).

    mma.m16n8k8. With lane = 4 g + t: a is [row g, column t], [g + 8, t], [g, t + 4], [g + 8, t + 4]; b is
    [row t, column g], [t + 4, g]; c as in `count_common_bits`.
    """
    kind = "m16n8k8.row.col.f32.tf32.tf32.f32"
    text = f"mma.sync.aligned.{kind} {{$0,$1,$2,$3}},{{$4,$5,$6,$7}},{{$8,$9}},{{$10,$11,$12,$13}};"
    operands = [*map(as_word, (*a, *b)), *c]
    return lanes.ptx([f32()] * 4, operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")


def multiply_bytes(a, b, c, signed: bool, b_signed: bool = True):
    """Integer tensor cores: c + a b.T, 16 rows of `a` and 8 columns of `b`.

    mma.m16n8k32 for four words of `a` and two of `b`, m16n8k16 for two and one. With lane = 4 g + t and
    columns k of A and B: words 0 and 1 of `a` hold k = 4 t .. 4 t + 3 of rows g and g + 8, words 2 and 3 k =
    16 + 4 t ..; `b` the same k of column g. c and the result: [row g, column 2 t], [g, 2 t + 1], [g + 8, 2
    t], [g + 8, 2 t + 1]. `signed` and `b_signed`: whether the bytes of `a` and `b` are.
    """
    operands = [*a, *b, *c]
    names = [f"${4 + i}" for i in range(len(operands))]
    braces = lambda names: "{" + ",".join(names) + "}"  # noqa: E731
    text = ",".join(
        braces(part) for part in (["$0", "$1", "$2", "$3"], names[: len(a)], names[len(a) : -4], names[-4:])
    )
    kind = f"m16n8k{8 * len(a)}.row.col.s32.{'s8' if signed else 'u8'}.{'s8' if b_signed else 'u8'}.s32"
    constraints = ",".join(["=r"] * 4 + ["r"] * len(operands))
    return lanes.ptx([i32()] * 4, operands, f"mma.sync.aligned.{kind} {text};", constraints)
