"""The tensor types of GGUF files: id, weights per block, bytes per block.

A format with a file in pallas_kernels/formats has a line here too, because this package does not import that
one; tests/pallas_kernels/test_formats.py compares them.
"""

from typing import NamedTuple

SHARED_ID = 42  # three layouts have this id; gguf.py recognizes which one a file uses
SHARED_LAYOUTS = ("q2_0_g64", "q2_0_g128", "tq2_0_g128")
NO_ID = -1  # formats that no file has: only arrays in memory


class Geometry(NamedTuple):
    """A format's id in GGUF files, and the weights and bytes of its blocks."""

    id: int
    weights: int
    bytes: int


# All tensor types of GGUF files. Those that no kernel or reference supports can still be listed and measured.
GEOMETRY = {
    "f32": Geometry(0, 1, 4),
    "f16": Geometry(1, 1, 2),
    "q4_0": Geometry(2, 32, 18),
    "q4_1": Geometry(3, 32, 20),
    "q5_0": Geometry(6, 32, 22),
    "q5_1": Geometry(7, 32, 24),
    "q8_0": Geometry(8, 32, 34),
    "q8_1": Geometry(9, 32, 40),
    "q2_k": Geometry(10, 256, 84),
    "q3_k": Geometry(11, 256, 110),
    "q4_k": Geometry(12, 256, 144),
    "q5_k": Geometry(13, 256, 176),
    "q6_k": Geometry(14, 256, 210),
    "q8_k": Geometry(15, 256, 292),
    "iq2_xxs": Geometry(16, 256, 66),
    "iq2_xs": Geometry(17, 256, 74),
    "iq3_xxs": Geometry(18, 256, 98),
    "iq1_s": Geometry(19, 256, 50),
    "iq4_nl": Geometry(20, 32, 18),
    "iq3_s": Geometry(21, 256, 110),
    "iq2_s": Geometry(22, 256, 82),
    "iq4_xs": Geometry(23, 256, 136),
    "i8": Geometry(24, 1, 1),
    "i16": Geometry(25, 1, 2),
    "i32": Geometry(26, 1, 4),
    "i64": Geometry(27, 1, 8),
    "f64": Geometry(28, 1, 8),
    "iq1_m": Geometry(29, 256, 56),
    "bf16": Geometry(30, 1, 2),
    "tq1_0": Geometry(34, 256, 54),
    "tq2_0": Geometry(35, 256, 66),
    "mxfp4": Geometry(39, 32, 17),
    "nvfp4": Geometry(40, 64, 36),
    "q1_0": Geometry(41, 128, 18),
    "q2_0_g64": Geometry(SHARED_ID, 64, 18),  # llama.cpp: f16 d, qs[16]
    "q2_0_g128": Geometry(SHARED_ID, 128, 34),  # PrismML: f16 d, qs[32]
    "tq2_0_g128": Geometry(SHARED_ID, 128, 34),  # OxiBonsai: qs[32], f16 d
    "pq2_0": Geometry(142, 128, 34),
    "ptq1_0": Geometry(143, 128, 28),
    "nvfp4_scaled": Geometry(NO_ID, 64, 38),
}
FORMAT_BY_ID = {g.id: name for name, g in GEOMETRY.items() if g.id not in (SHARED_ID, NO_ID)}


def tensor_nbytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this shape, whose last dimension is a multiple of the format's block; of one value
    where the shape has none."""
    *rows, columns = shape or (1,)
    blocks = columns // GEOMETRY[format].weights
    for dim in rows:
        blocks *= dim
    return blocks * GEOMETRY[format].bytes
