"""NVFP4 with its tensor's scale: 64 weights in 38 bytes, 4.75 bits a weight.   w = m / 128 * w of NVFP4

m f16: 128 times the scale, because scales are often below 2^-14, from where float16 has fewer bits
d 4 bytes, qs 32 bytes: those of NVFP4 (nvfp4.py)

No file has it. An NVFP4 matrix becomes this while it is loaded if the file has a scale for it or, where
experts share a tensor, for each expert (bonsai_jax/weights/scales.py). The scale is rounded to 11 bits.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.cpu.vectors import Vectors
from pallas_kernels.formats import nvfp4

WEIGHTS = 64
BLOCK = np.dtype([("m", "<f2"), *nvfp4.BLOCK.descr])
UNSCALED = {"m": 128}  # the fields that NVFP4 lacks, for a scale of 1


def dequantize(block):
    return block["m"].astype(jnp.float32)[..., None] / 128 * nvfp4.dequantize(block)


def _random_m(key, shape, scale):
    """2, as a root mean square."""
    return jax.random.choice(key, jnp.array([1.5, 2, 2.4], jnp.float16), shape)


def _random_d(key, shape, scale):
    return nvfp4.RANDOM["d"](key, shape, 64 * scale)


RANDOM = {"m": _random_m, "d": _random_d}

# Lane 4 g + t has groups 2 t and 2 t + 1 of each eight, so two words: m of rows g and g + 8 in the first 128
# columns, and in the others. Lanes with the same t / 2 share them.
FLOATS = tiles.Arrangement({"u": 2, "h": 2}, "ghur")


def tile(block):
    """Blocks -> those of NVFP4 and {"m": uint32 [*lead, N / 16, K / 256, 16, 2]}, 4.75 bits a weight."""
    m = FLOATS.tiled(block["m"])
    return nvfp4.tile(block) | {"m": tiles.bits(m.reshape(*m.shape[:-4], 16, 2, 2))}


def untile(tiled, shape):
    m = FLOATS.untiled(tiles.halves(tiled["m"]), (shape[0], -(-shape[1] // 256) * 4), axes=3)
    return nvfp4.untile(tiled, shape) | {"m": m[..., : shape[1] // 64]}


def _scales(fields, lane):
    from pallas_kernels.gpu import lanes

    eights = []
    for (scale, *_), word in zip(nvfp4.lane_scales(fields, lane), fields["m"], strict=True):
        m = [value * (1 / 128) for value in lanes.halves(word)]
        eights.append(tiles.Scales([[m[r] * v for v in scale[r]] for r in (0, 1)]))
    return eights


LANES = tiles.Lanes(nvfp4.WORDS, signed=True, minimums=False, scales=_scales)


CPU = Vectors(
    nvfp4.CPU.columns,
    nvfp4.CPU.group,
    codes=nvfp4.CPU.codes,
    scales=lambda load: load("m").float().take(np.repeat([0, 1], 4)) * nvfp4.vector_scales(load) * (1 / 128),
    zero=nvfp4.CPU.zero,
)
