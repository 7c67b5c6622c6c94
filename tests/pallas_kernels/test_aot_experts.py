"""Every format that a kernel of experts takes compiles for Hopper, for the widths of real mixtures."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import experts_ffn, formats
from pallas_kernels.matmul.int_mma.decode_plan import SMALL_BLOCK_COLUMNS
from pallas_kernels.problems import Matmul
from pallas_kernels.selection import products
from tests.pallas_kernels.aot import as_on_a_gpu, compile_for_gpu
from tests.pallas_kernels.aot_kernels import stack_of_experts

pytestmark = pytest.mark.aot

# hidden, of an expert, experts, used
MIXTURES = {
    "maple": (2048, 512, 256, 8),
    "gpt-oss": (2880, 2880, 32, 4),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "deepseek-v2-lite": (2048, 1408, 64, 6),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
}
# Formats that have 32 bytes of scales in 16 rows x 256 columns: Mosaic does not copy those of six tiles.
EVERY_DAY = [("tq2_0", "maple"), ("q6_k", "deepseek-v2-lite"), ("mxfp4", "gpt-oss")]


@pytest.mark.parametrize(
    ("format", "mixture"),
    [
        pytest.param(format, mixture, marks=[] if (format, mixture) in EVERY_DAY else [pytest.mark.slow])
        for format in formats.names("int")
        for mixture in MIXTURES
    ],
)
def test_experts_compile_in_every_format_and_width(format, mixture):
    """A decode step's tokens by int_experts, a prefill's by tiles of few tokens, of 96, and of up to 256. The
    20 and 64 of a large step are in tiles of a step or of a prefill."""
    hidden, ffn, count, used = MIXTURES[mixture]
    with as_on_a_gpu((9, 0)):
        matrix = Matmul("sm_90", format, ffn, hidden)
        stack = functools.partial(stack_of_experts, format, lead=(2, count), products=products(matrix))
        for tokens in (1, 20, 64, 64 * count // used, 160 * count // used):
            chosen = functools.partial(jax.ShapeDtypeStruct, (tokens, used))
            biases = [jnp.zeros((count, n)) for n in (ffn, ffn, hidden)] if mixture == "gpt-oss" else None
            compiled = compile_for_gpu(
                functools.partial(experts_ffn, layer=1, biases=biases),
                jax.ShapeDtypeStruct((tokens, hidden), jnp.float32),
                *(stack(ffn, hidden), stack(ffn, hidden), stack(hidden, ffn)),
                *(chosen(jnp.int32), chosen(jnp.float32)),
            )
            in_small_tiles = tokens <= 16 or (tokens <= 64 and max(hidden, ffn) <= SMALL_BLOCK_COLUMNS)
            kernel = "int_experts" if in_small_tiles else "int_prefill_sm90"
            assert compiled.as_text().count(f"/{kernel}/") >= 2
