"""MXFP4 (OCP microscaling): 32 weights in 17 bytes, 4.25 bits a weight.   w = 2^(e - 128) * v(q),  q in 0..15

    q      0  1  2  3  4  5  6   7     8 to 15 are the same below 0
    v(q)   0  1  2  3  4  6  8  12

e u8 | qs 16 bytes: the low nibble of byte j is weight j, the high nibble weight j + 16

v is twice the four-bit float of one sign bit, two of exponent and one of mantissa.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing, tiles
from pallas_kernels.cpu.vectors import NIBBLES, Vectors
from pallas_kernels.formats.iq4_nl import Selectors

WEIGHTS = 32
BLOCK = np.dtype([("e", "u1"), ("qs", "u1", 16)])
# v(q) for q > 0 is its fraction in [1, 2), as float32 has it with the leading 1, times 2^POWER.
FRACTION = np.array([0, 2, 2, 3, 2, 3, 2, 3], np.uint32) << 22
POWER = np.array([0, 0, 1, 1, 2, 2, 3, 3], np.int32)


def dequantize(block):
    """Computed from the bits of float32, because XLA flushes the smallest numbers (e = 0 and 1) to zero."""
    q = packing.codes(block["qs"], 4)
    fraction = jnp.asarray(FRACTION)[q & 7]
    exponent = block["e"].astype(jnp.int32)[..., None] - 1 + jnp.asarray(POWER)[q & 7]
    normal = (exponent << 23).astype(jnp.uint32) + (fraction & 0x7FFFFF)
    small = fraction >> (1 - jnp.minimum(exponent, 1)).astype(jnp.uint32)
    bits = jnp.where(exponent > 0, jnp.where(exponent < 255, normal, 0x7F800000), small)
    bits = jnp.where(fraction == 0, 0, bits | (q >> 3).astype(jnp.uint32) << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def quantize(x):
    """e is the power of two of max |x|, less 2; q the nearest of the 16 values (ggml's
    quantize_row_mxfp4_ref, to the bit, but where a logarithm in float32 rounds up to the next power)."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x).max(axis=-1), jnp.uint32)
    power = (bits >> 23).astype(jnp.int32)  # of max |x|, plus 127
    e = jnp.where(power > 0, power - 2, 0)
    unit = jax.lax.bitcast_convert_type(jnp.maximum(e - 1, 1) << 23, jnp.float32)
    return {"e": e.astype(jnp.uint8), "qs": packing.packed(nearest(x, unit[..., None]), 4)}


def nearest(x, unit):
    """uint8 [..., n]: the codes whose values, times `unit`, come nearest to x; of two as near, the one with
    the smaller code (shared with NVFP4)."""
    values = np.concatenate([VALUES, -VALUES.astype(np.int32)]).astype(np.float32)
    least, code = jnp.abs(x), jnp.zeros(x.shape, jnp.uint8)
    for q in range(1, 16):
        away = jnp.abs(values[q] * unit - x)
        least, code = jnp.minimum(least, away), jnp.where(away < least, jnp.uint8(q), code)
    return code


def _random_e(key, shape, scale):
    """One of the two powers of two around scale / 5.852, drawn so that the weights have the right mean square
    (v has root mean square 5.852)."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    exponent = jnp.log2(scale / 5.852)
    below = jnp.floor(exponent)
    share = (4 ** (exponent - below) - 1) / 3  # of the larger one, whose square is four times as large
    return (below + 128 + (bits < 256 * share)).astype(jnp.uint8)


RANDOM = {"e": _random_e}


VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.uint8)  # v(q) of q = 0 to 7


@dataclasses.dataclass(frozen=True)
class Signs(Selectors):
    """Codes as `prmt` wants them, the sign on top as it is."""

    def tiled(self, codes):
        return super().tiled(codes << 1 & 15 | codes >> 3)

    def untiled(self, words, shape, weights):
        codes = super().untiled(words, shape, weights)
        return codes >> 1 | codes << 3 & 8

    def table(self):
        """`prmt` gives 0 for a nibble with the top bit, because no byte of the tables has it. So one of two
        bytes is 0 and the other v + 12; 116 more makes v + 128, and the top bit turned v. No byte carries
        over into the next."""
        from pallas_kernels.gpu import lanes
        from pallas_kernels.gpu.values import integer

        def words(values):
            low, high = map(int, values.astype(np.uint8).view("<u4"))
            return lanes.in_register(low), integer(high)

        above, below = words(12 + VALUES), words(12 - VALUES)
        add = 116 * tiles.ONES

        def look_up(word, other, right):
            first = lanes.chosen_bytes(*above, word >> right)
            return first + lanes.chosen_bytes(*below, other >> right) + add ^ 0x80808080

        return look_up


WORDS = Signs(32, "00000000")


def tile(block):
    """Blocks -> {"words": `Signs`, "scales": uint32 [*lead, N / 16, K / 256, 32]}, 4.25 bits a weight as in
    the file. The bytes of lane 4 g + t are e of rows g and g + 8, each of groups 2 t and 2 t + 1."""
    e = tiles.lane_scales(block["e"], 32)[..., 0, :, :, :]
    scales = jax.lax.bitcast_convert_type(e.reshape(*e.shape[:-2], 4), jnp.uint32)
    return {"words": WORDS.tiled(packing.codes(block["qs"], 4)), "scales": scales}


def untile(tiled, shape):
    e = jax.lax.bitcast_convert_type(tiled["scales"], jnp.uint8)
    e = tiles.from_lane_scales(e.reshape(*e.shape[:-2], 1, 32, 2, 2), shape)
    return {"e": e, "qs": packing.packed(WORDS.untiled(tiled["words"], shape, WEIGHTS), 4)}


def _scales(fields, lane):
    """2^(e - 128), 0 for the smallest, which float32 has only without its leading 1 (e = 0 and 1)."""
    from pallas_kernels.gpu.values import as_real

    (word,) = fields["scales"]
    powers = [as_real(word << 23 - 8 * i & 0x7F800000 if i < 3 else word >> 1 & 0x7F800000) for i in range(4)]
    return [tiles.Scales([[v * 0.5 for v in powers[i : i + 2]] for i in (0, 2)])]


LANES = tiles.Lanes(WORDS, signed=True, minimums=False, scales=_scales)


def vector_codes(load):
    """Codes are v(q) + 12 (shared with NVFP4)."""
    table = [12 + sign * int(value) for sign in (1, -1) for value in VALUES]
    qs = load("qs")
    return [codes.looked_up(table) for codes in (qs & 15, qs >> 4)]


CPU = Vectors(
    NIBBLES,
    group=32,
    codes=vector_codes,
    scales=lambda load: (load("e").words() << 7).bfloat16() * 0.5,  # 2^(e - 127) / 2
    zero=12,
)
