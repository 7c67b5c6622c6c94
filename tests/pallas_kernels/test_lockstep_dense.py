"""The decoding kernel in numpy (lockstep): the same bits as the definition's, rounded to float16."""

import numpy as np
import pytest

from pallas_kernels import LayerStack, formats
from pallas_kernels.matmul.int_mma import dequantize as int_dequantize
from pallas_kernels.qtensor import Rows
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn

INTEGER = formats.names("int")
LAYERS = 3


def in_lockstep(weights, layer):
    with lockstep(at_a_time=16):
        return np.asarray(int_dequantize.run(weights, layer))


# Each format in a matrix without whole tiles. How a layer is found does not depend on the format.
LAYERS_OF = {"known": (48, 512, 1), "last": (40, 256, -1), "traced": (48, 512, np.int32(2))}
CASES = [
    pytest.param(format, *case, id=f"{format}-{name}", marks=[] if every_day else pytest.mark.slow)
    for format in INTEGER
    for name, case in LAYERS_OF.items()
    for every_day in [name == "last" or format in ("q4_k", "q6_k")]
]


@pytest.mark.parametrize(("format", "N", "K", "layer"), CASES)
def test_what_it_decodes_is_the_definition_bit_for_bit(format, N, K, layer):
    w = drawn(format, (LAYERS, N, K))
    np.testing.assert_array_equal(in_lockstep([w.tiled], layer), w.dense[layer].astype(np.float16))


@pytest.mark.parametrize("format", [f for f in INTEGER if formats.get(f).WEIGHTS == 32])
def test_columns_need_no_whole_tile(format):
    w = drawn(format, (24, 576))
    np.testing.assert_array_equal(in_lockstep([w.tiled], None), w.dense.astype(np.float16))


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("known", [True, False])
def test_the_kernel_finds_the_format_that_a_layer_has(layer, known):
    """Queries, keys and values whose formats differ from layer to layer, and a second weight below."""
    K = 256
    mixed = [drawn("q4_k", (2, 32, K), 1), drawn("q6_k", (2, 16, K), 2)]
    alike = drawn("q5_k", (1, 48, K), 3)
    where = ((0, 1), (1, 0), (0, 0))
    other = drawn("q8_0", (LAYERS, 40, K), 4)
    part, index = where[layer]
    want = [piece.dense[index] for piece in (mixed if part == 0 else [alike])]
    tiled = LayerStack((Rows(tuple(piece.tiled for piece in mixed)), alike.tiled), where)
    got = in_lockstep([tiled, other.tiled], layer if known else np.int32(layer))
    np.testing.assert_array_equal(got, np.concatenate([*want, other.dense[layer]]).astype(np.float16))
