"""Latent attention's kernels on a GPU, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attend_latent, device, each_matmul, problems
from pallas_kernels.latent import empty_latent_workspace, prefill
from pallas_kernels.qtensor import LayerStack, Products, quantize
from tests.pallas_kernels.latent_cases import latent_case
from tests.pallas_kernels.stacks import drawn
from tests.refused_cases import unless_refused

pytestmark = pytest.mark.gpu

GLM = {"heads": 20, "rank": 512, "nope": 192, "rope": 64, "value": 256, "page_size": 64}
DEEPSEEK = GLM | {"heads": 16, "nope": 128, "value": 128}
# Against rows that are not rounded when they are stored.
ERRORS = {"float16": 1e-3, "bfloat16": 8e-3}


def problem(phase, sizes, dtype):
    width = sizes["rank"] + sizes["rope"]
    return problems.Attention(
        device.platform(), phase, sizes["heads"], 1, width, sizes["page_size"], dtype, values=sizes["rank"],
        expanded=(sizes["nope"] + sizes["rope"], sizes["value"]),
    )  # fmt: skip


@unless_refused(lambda sizes, dtype: ("latent_prefill", problem("prefill", sizes, dtype)))
@pytest.mark.parametrize("most", [2**27, 1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [GLM, DEEPSEEK, GLM | {"page_size": 24}], ids=["GLM", "DeepSeek", "pages"])
def test_many_queries_attend_to_keys_that_are_made_of_rows(sizes, dtype, most, monkeypatch):
    monkeypatch.setattr(prefill, "EXPANDED", most)
    positions = np.full((2, 200), -1)
    positions[0], positions[1, :130] = 77 + np.arange(200), np.arange(130)
    case = latent_case(positions, **sizes, dtype=dtype, pages=-(-320 // sizes["page_size"]))
    run = jax.jit(lambda *a: attend_latent(*a, 1, **case.keywords, prefill_impl="latent_prefill")[:2])
    (out, pages), (again, _) = (jax.tree.map(np.asarray, run(*case.arguments[:-1])) for _ in range(2))
    np.testing.assert_array_equal(out, again)
    got, expected = out[case.is_real], case.expected[case.is_real]
    assert np.linalg.norm(got - expected) < ERRORS[dtype] * np.linalg.norm(expected)
    np.testing.assert_allclose(case.stored(pages), case.rows[case.is_real], rtol=ERRORS[dtype], atol=1e-5)


@unless_refused(lambda sizes, dtype: ("latent_decode", problem("decode", sizes, dtype)))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [[0], [100], [700], [5, -1, 0, 300], [63] * 40 + [200] * 30], ids=len)
@pytest.mark.parametrize("sizes", [GLM, DEEPSEEK | {"page_size": 24}], ids=["GLM", "DeepSeek"])
def test_one_query_attends_in_one_launch(sizes, lengths, dtype):
    """And all layers share a workspace."""
    pages = max(lengths) // sizes["page_size"] + 1
    case = latent_case(np.asarray(lengths)[:, None], **sizes, dtype=dtype, pages=pages, beside=768)
    q, latents, k_b, v_b, stored, table, positions, _ = case.arguments

    @jax.jit
    def run(*arguments):
        q, latents, k_b, v_b, stored, table, positions = arguments
        workspace = empty_latent_workspace(len(q), q.shape[2], stored, table)
        for layer in (0, 1, 0, 1):
            out, stored, workspace = attend_latent(
                q, latents, k_b, v_b, stored, table, positions, layer, **case.keywords,
                impl="latent_decode", workspace=workspace,
            )  # fmt: skip
        return out, stored

    arguments = q, latents, k_b, v_b, stored, table, positions
    (out, pages), (again, _) = (jax.tree.map(np.asarray, run(*arguments)) for _ in range(2))
    np.testing.assert_array_equal(out, again)
    got, expected = out[case.is_real], case.expected[case.is_real]
    assert np.linalg.norm(got - expected) < ERRORS[dtype] * np.linalg.norm(expected)
    np.testing.assert_allclose(case.stored(pages), case.rows[case.is_real], rtol=ERRORS[dtype], atol=1e-5)
    assert (out[~case.is_real] == 0).all()


@unless_refused(lambda: ("latent_decode", problem("decode", GLM, "float16")))
@pytest.mark.parametrize("lengths", [[131071], [20000, 3, 9999], [3000] * 16], ids=len)
def test_one_query_attends_to_many_rows(lengths):
    """As the reference does, which adds in float32 and in another order."""
    rows, heads = len(lengths), 20
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)  # noqa: E731
    pages = max(lengths) // 64 + 1
    stored = draw(0, 1, rows * pages, 64, 1, 576).astype(jnp.float16)
    table = jnp.asarray(np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages), jnp.int32)
    w = [quantize(draw(i, 1, heads, *shape) / 23, "f32") for i, shape in ((1, (512, 192)), (2, (256, 512)))]
    w = [LayerStack((each,), ((0, 0),)) for each in w]
    positions = jnp.asarray(lengths, jnp.int32)[:, None]
    angles = positions[..., None] / 1e4 ** (jnp.arange(32) / 32)
    keywords = {
        "rotation": (jnp.cos(angles), jnp.sin(angles)), "interleaved": True, "norm": jnp.ones((1, 512)),
        "eps": 1e-6, "scale": 256**-0.5, "num_keys": pages * 64,
    }  # fmt: skip
    # Queries that prefer some of the rows.
    arguments = 3 * draw(3, rows, 1, heads, 256), draw(4, rows, 1, 1344), *w, stored, table, positions
    expected, got = (
        np.asarray(jax.jit(lambda *a, impl=impl: attend_latent(*a, 0, **keywords, impl=impl)[0])(*arguments))
        for impl in ("reference", "latent_decode")
    )
    assert np.linalg.norm(got - expected) < 5e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("tokens", [1, 20, 130, 1000])
@pytest.mark.parametrize("format", ["q8_0", "q4_k"])
def test_matrices_of_heads_multiply_many_rows(format, tokens):
    stack = drawn(format, (2, 20, 512, 256), 5)
    products = Products(((16, "int_decode"), (None, "cublas")), tiled=True)
    w = LayerStack((stack.tiled.replace(products=products),), ((0, 0), (0, 1)))
    x = np.random.default_rng(tokens).standard_normal((tokens, 20, 256)).astype(np.float32)
    expected = np.einsum("enk,mek->men", stack.dense[1].astype(np.float64), x)
    got = jax.jit(lambda x, w: each_matmul(x, w, 1))(x, w)
    rounding = 1e-3 if tokens >= 129 else 2e-2  # float16, or 8 bits
    assert np.linalg.norm(got - expected) < rounding * np.linalg.norm(expected)
