"""IQ1_S: 256 weights in 50 bytes, 1.5625 bits a weight.   w = d * (2 sc + 1) * (v + r)

Eight weights at a time are a point of GRID, v; sc in 0..7 and r = 1/8 or -1/8 are of 32 weights.

    d f16
    qs 32 bytes: byte i is bits 7-0 of the number of the point of weights 8i .. 8i+7
    qh 8 u16: bits 3i .. 3i+2 of number g are bits 10-8 of the number of point 4g + i; bits 14-12: sc; bit 15
              is 1 where r is negative
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.codebooks import in_chunks, joined, odd_scales, ternary_points
from pallas_kernels.cpu import points
from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.encoding import column_weights
from pallas_kernels.formats.iq2_xxs import half_scale, lattice

WEIGHTS = 256
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
RANDOM = {"d": 1 / 7.200}  # root mean squares: 9.220 of 2 sc + 1, 0.7809 of v + r
GRID = lattice(
    "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*"
    "h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?"
    "HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$"
    "Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{Wd"
    "kSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb"
    "_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eo"
    "u`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR"
    "~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e"
    "^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1",
    (-1, 0, 1),
    8,
)

SHIFT = 0.125
FACTOR = 1.125  # ggml's, of d


def dequantize(block):
    lead = block["d"].shape
    high = block["qh"][..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    number = block["qs"].astype(jnp.uint16) | high.reshape(*lead, 32) << 8
    scale = 2 * half_scale(block["d"], block["qh"] >> 12 & 7)
    v = jnp.asarray(GRID)[number].reshape(*lead, 8, 32) + eighth(block["qh"] >> 15)[..., None]
    return (scale[..., None] * v).reshape(*lead, 256)


def eighth(negative):
    """r: -1/8 where `negative` is 1, 1/8 where it is 0."""
    return 0.125 - 0.25 * negative.astype(jnp.float32)


def quantize_weighted(x, importance):
    """Of each 32 weights scale, sign of r and points by ggml's search; scales in 3 bits, of d."""
    return in_chunks(_stored, x, column_weights(x, importance, 2))


def _stored(x, weights):
    numbers, shifts, scales = ternary_points(x, weights, GRID, 32, 1, SHIFT)
    d, sc = odd_scales(scales, 7)
    high = joined((numbers >> 8).reshape(-1, 8, 4), 3) | sc.astype(jnp.uint32) << 12
    return {
        "d": (FACTOR * d).astype(jnp.float16),
        "qs": numbers.astype(jnp.uint8),
        "qh": (high | (shifts[..., 0] < 0).astype(jnp.uint32) << 15).astype(jnp.uint16),
    }


EIGHTHS = 8 * GRID + 16  # of v, as codes


def _vector_codes(load):
    """Codes are 8 (v + r) + 16."""
    qh = load("qh")
    numbers = load("qs").words() | (points.each_part(qh, [0, 3, 6, 9]) & 7) << 8
    r = (-((qh >> 15) * 2) + 1).low_bytes()
    v = numbers.rows_of(EIGHTHS)
    return [v[64 * p : 64 * p + 64] + r.take(np.repeat([2 * p, 2 * p + 1], 32)) for p in range(4)]


def _vector_scales(load):
    return load("d").float().splat(8) * ((load("qh") >> 12 & 7).float() * 2.0 + 1.0) * 0.125


CPU = Vectors(NATURAL, group=32, codes=_vector_codes, scales=_vector_scales, zero=16)
