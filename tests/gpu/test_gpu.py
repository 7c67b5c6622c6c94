"""On a GPU, without gguf, xllamacpp or uv: kept oracle values, and the device-independent tests once more.

PYTHONPATH=. python -m pytest -m gpu
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import cache as kv
from bonsai_jax import jitted
from pallas_kernels import (
    LayerStack,
    Products,
    QTensor,
    attend,
    cache_layouts,
    dequantize,
    device,
    for_device,
    formats,
    from_blocks,
    gated,
    matmul,
    problems,
    selection,
)
from pallas_kernels.qtensor import tile

# The same tests, run again here because the mark below is this module's.
from tests.agreement import agreement, log_softmax
from tests.bonsai_jax.test_decoding import *  # noqa: F403
from tests.bonsai_jax.test_decoding import GREEDY, padded
from tests.bonsai_jax.test_sampling import *  # noqa: F403
from tests.kept_oracles import DATA, TINY
from tests.pallas_kernels.test_cache_layouts import *  # noqa: F403
from tests.pallas_kernels.test_cache_layouts import ROUNDING
from tests.pallas_kernels.test_gemm import has_float16_scales

pytestmark = pytest.mark.gpu

# Layouts whose pages tensor cores multiply as they lie.
AS_THEY_LIE = [n for n in cache_layouts.names() if n == cache_layouts.get(n).PREFILL]


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu():
    assert jax.default_backend() == "gpu", "these tests ask for a GPU; jax found none"


@functools.cache
def kept_formats():
    return dict(np.load(DATA / "formats.npz"))


@pytest.mark.parametrize("format", formats.names())
def test_decoding_is_bit_exact(format):
    raw, weights = kept_formats()[f"{format}.raw"], kept_formats()[f"{format}.weights"]
    w = jax.jit(from_blocks, static_argnames="format")(raw, format=format)
    np.testing.assert_array_equal(np.asarray(jax.jit(dequantize)(w)).view(np.uint32), weights.view(np.uint32))


@pytest.mark.parametrize("format", formats.names())
def test_the_definition_of_matmul_is_float32_and_not_tf32(format):
    raw, weights = kept_formats()[f"{format}.raw"], kept_formats()[f"{format}.weights"].astype(np.float64)
    x = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    got = np.asarray(matmul(jnp.asarray(x), from_blocks(jnp.asarray(raw), format)), np.float64)
    want = x.astype(np.float64) @ weights.T
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("source", TINY)
@pytest.mark.parametrize("cache_dtype", cache_layouts.names())
def test_tiny_models_say_what_llama_cpp_said(source, cache_dtype):
    """llama.cpp rounds activations to 8 bits on these; the cache rounds keys and values here."""
    kept = json.loads((DATA / "tiny_oracle.json").read_text())[source]
    found = agreement(bj.load(source, bj.RunConfig(cache_dtype=cache_dtype)), kept)
    print(f"{source} {cache_dtype}: KL {found.kl:.2e}, same top token {found.same_top:.2%}")
    assert found.kl < 2e-3 and found.same_top > 0.95


def test_the_same_input_gives_the_same_bits():
    model = bj.load("synth:tiny-qwen3:q4_k_m")
    runs = [bj.logits(model, list(range(50))) for _ in range(3)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        (64, 256, 1, "plain"),
        (1000, 896, 3, "normed"),  # neither whole tiles nor whole pairs of groups
        (4096, 4096, 1, "added"),
        (2048, 2560, 8, "gated"),
        (2560, 9728, 2, "added"),
        (151669, 2048, 1, "normed"),
    ],
)
def test_the_1_bit_kernel_is_its_definition_on_its_own_codes(N, K, rows, kind, bits):
    rng = np.random.default_rng(N + K)
    layers, layer = (1, 0) if N > 10000 else (3, 2)
    stacks = []
    for seed in range(2 if kind == "gated" else 1):
        fields = formats.random_fields("q1_0", jax.random.key(seed), (layers, N, K // 128), 0.0, 0.02)
        stacks.append(QTensor(fields, "q1_0", (N, K)))
    # Powers of two times whole numbers, with the largest code in every group: quantizing them is exact, so
    # that what is compared is the product. (Of random activations, one code in 1e4 lies near enough to a half
    # to go either way.)
    top = 2 ** (bits - 1) - 1
    x = rng.integers(-top, top + 1, (rows, K // 128, 128))
    x[..., 5] = top
    x = (x * 2.0 ** rng.integers(-12, -8, (rows, K // 128, 1))).reshape(rows, K).astype(np.float32)
    gamma = np.repeat(2.0 ** rng.integers(-1, 2, (layers, K // 128)), 128, axis=1).astype(np.float32)
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    dense = [np.asarray(dequantize(w[layer]), np.float64) for w in stacks]
    codes, norm = (x * gamma[layer] if kind in ("normed", "gated") else x).astype(np.float64), 1.0
    if kind in ("normed", "gated"):
        norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    want = [norm * codes @ w.T for w in dense]
    want = want[0] / (1 + np.exp(-want[0])) * want[1] if kind == "gated" else want[0]
    tiled = [for_device(w, matrices=len(stacks), bits=bits) for w in stacks]
    for w, before in zip(tiled, stacks, strict=True):
        np.testing.assert_array_equal(dequantize(w), dequantize(before))
    if kind == "gated":
        gate, up = (LayerStack((w,), tuple((0, i) for i in range(layers))) for w in tiled)
        run = jax.jit(lambda x: gated(x, gate, up, layer, gamma=jnp.asarray(gamma), eps=1e-6))
    else:
        norms = {"gamma": jnp.asarray(gamma), "eps": 1e-6} if kind == "normed" else {}
        added = {"residual": jnp.asarray(residual)} if kind == "added" else {}
        run = jax.jit(lambda x: matmul(x, tiled[0], layer, **norms, **added))
        want = want + residual if kind == "added" else want
    got = [np.asarray(run(x)) for _ in range(3)]
    assert np.linalg.norm(got[0] - want) < 1e-5 * np.linalg.norm(want)
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])


def single_bits(K: int) -> QTensor:
    """Q1_0 weights whose products give activations away: for each group of 128 columns, which alone has a
    scale (1), a row without a bit and a row for each column, with that bit only.

    y[bit k] - y[no bit] = (2 q_k - total) s - (0 - total) s = 2 s q_k
    """
    groups = K // 128
    d = np.repeat(np.eye(groups, dtype=np.float16), 129, axis=0)
    qs = np.zeros((groups, 129, groups, 16), np.uint8)
    for k in range(128):
        qs[np.arange(groups), 1 + k, np.arange(groups), k // 8] = 1 << k % 8
    fields = {"d": jnp.asarray(d), "qs": jnp.asarray(qs.reshape(-1, groups, 16))}
    return QTensor(fields, "q1_0", (groups * 129, K))


def codes_in(y: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Codes [rows, groups, 128] from products with `single_bits` and each group's step [rows, groups, 1]."""
    y = y.astype(np.float64).reshape(len(y), -1, 129)
    return (y[:, :, 1:] - y[:, :, :1]) / (2 * step)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rows", [1, 8])  # by q1_decode_b1, by q1_decode_s8
@pytest.mark.parametrize(("K", "normed"), [(4096, False), (4096, True), (896, True), (9728, False)])
def test_codes_that_a_kernel_makes_are_the_definition_s(K, normed, rows, bits):
    """q = round(x top / absmax) in float32; at most one in 1e4 may be off, and by one."""
    rng = np.random.default_rng(K + bits)
    x = rng.standard_normal((rows, K)).astype(np.float32)
    x[:, rng.integers(0, K, 20)] *= 30  # a few outliers, as real activations have
    gamma = rng.uniform(0.5, 2, (1, K)).astype(np.float32)
    codes = (x * gamma if normed else x).reshape(rows, -1, 128)
    largest, top = np.abs(codes).max(-1, keepdims=True), np.float32(2 ** (bits - 1) - 1)
    want = np.rint(codes * (top / largest))
    norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1) + 1e-6) if normed else np.ones(rows)
    w = for_device(single_bits(K), bits=bits)
    norms = {"gamma": jnp.asarray(gamma[0]), "eps": 1e-6} if normed else {}
    y = np.asarray(jax.jit(lambda x: matmul(x, w, **norms))(x))
    found = codes_in(y, norm[:, None, None] * largest.astype(np.float64) / top)
    assert np.abs(found - np.rint(found)).max() < 0.1  # the difference gives whole numbers
    off = np.abs(np.rint(found) - want)
    print(f"{rows} rows of {K} columns, {bits} bits: {(off > 0).sum()} of {off.size} codes differ")
    assert off.max() <= 1 and (off > 0).mean() <= 1e-4


@pytest.mark.parametrize(
    ("H", "Hkv", "D", "B", "pages", "interleaved", "normed"),
    [
        (32, 8, 128, 1, 3, False, True),
        (32, 8, 128, 1, 40, False, True),
        (16, 8, 128, 8, 5, False, True),
        (9, 3, 64, 2, 20, True, False),
        (14, 2, 64, 3, 9, False, False),
        (32, 8, 128, 33, 5, False, True),  # more rows than blocks at once: teams of four warps
        (16, 8, 128, 131, 3, False, True),  # and of one
        (24, 4, 256, 1, 40, False, True),  # the widest heads have gates, and only a part of them is turned
        (6, 1, 256, 3, 5, False, True),
    ],
)
@pytest.mark.parametrize("layout", cache_layouts.names())
def test_the_attention_kernel_is_the_reference(layout, H, Hkv, D, B, pages, interleaved, normed):
    rng = np.random.default_rng(D + H + pages)
    L, page_size, layer, gated = 2, 64, 1, D == 256
    pairs = 32 if gated else D // 2
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    qkv = draw(B, 1, ((1 + gated) * H + 2 * Hkv) * D)
    empty = cache_layouts.empty(layout, (L, B * pages, page_size, Hkv, D))
    k_pages, v_pages = (cache_layouts.write(empty, draw(*cache_layouts.shape(empty)), ()) for _ in range(2))
    table = jnp.asarray(rng.permutation(B * pages).reshape(B, pages), jnp.int32)
    positions = rng.integers(0, pages * page_size, B)
    positions[0] = pages * page_size - 1
    if B > 1:
        positions[1] = 0  # the first token of all
    if B > 2:
        positions[2] = -1  # a row that has ended
    angle = jnp.asarray(positions[:, None, None] * 10000.0 ** (-np.arange(pairs) / pairs), jnp.float32)
    rest = {
        "rotation": (jnp.cos(angle), jnp.sin(angle)),
        "interleaved": interleaved,
        "norms": (1 + 0.1 * draw(L, D), 1 + 0.1 * draw(L, D)) if normed else (None, None),
        "eps": 1e-6,
        "num_keys": pages * page_size,
        "gated": gated,
    }
    positions = jnp.asarray(positions[:, None], jnp.int32)
    args = (qkv, k_pages, v_pages, table, positions)
    want = jax.jit(lambda *a: attend(*a, layer, **rest))(*args)
    runs = [jax.jit(lambda *a: attend(*a, layer, **rest, impl="decode"))(*args) for _ in range(2)]
    for got in runs:
        np.testing.assert_allclose(got[0], want[0], atol=max(3e-5, 1.28 * ROUNDING[layout]), rtol=1e-5)
        for pages_got, pages_want in zip(got[1:3], want[1:3], strict=True):
            a, b = (cache_layouts.read(pages, ()) for pages in (pages_got, pages_want))
            # By one ulp, of numbers below 4; of bytes by one step of a head's largest, below 8.
            assert jnp.abs(a - b).max() <= max(1e-5, (16 if layout == "int8" else 4) * ROUNDING[layout])
            assert (a != b).mean() < 1e-3
    np.testing.assert_array_equal(runs[0][0], runs[1][0])


def step_log_p(model, ids, cache=None):
    """Log-probabilities after each token, read one by one, behind what the cache holds: through the kernels
    of a decode step."""
    cache, out = cache or kv.empty(model.config, model.run, 1, len(ids)), []
    for token in ids:
        tokens, lengths = jnp.array([[token]], jnp.int32), jnp.array([1], jnp.int32)
        scores, cache = jitted.extend(model.params, cache, tokens, lengths, model.config)
        out.append(np.asarray(scores[0, 0]))
    return log_softmax(np.stack(out))


@pytest.mark.parametrize("schedule", ["one_launch", "launches"])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-qwen2"])
@pytest.mark.parametrize(("bits", "limit"), [(8, 5e-3), (16, 1e-5)])
def test_steps_through_kernels_are_near_the_exact_definition(name, bits, limit, schedule):
    ids = np.random.default_rng(3).integers(0, 256, 40).tolist()
    run = bj.RunConfig(cache_dtype="float32", activation_bits=bits, schedule=schedule)
    kernels = bj.load(f"synth:{name}:q1_0", run)
    assert kernels.params.layers.wqkv[0].parts[0].tiled and kernels.params.step.schedule(1) == schedule
    exact = dataclasses.replace(run, impl="reference", schedule="auto")
    exact = bj.logits(bj.load(f"synth:{name}:q1_0", exact), ids)
    assert exact.std() > 2
    p, q = log_softmax(exact), step_log_p(kernels, ids)
    kl = (np.exp(p) * (p - q)).sum(-1).mean()
    print(f"{name}, {bits} bits, {schedule}: KL {kl:.2e}")
    assert 0 < kl < limit


@pytest.mark.parametrize("format", ["q4_k_m", "q2_k", "q3_k", "iq4_xs"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_of_two_launches_a_layer_is_that_of_launches(format, rows):
    """But for 22 bits of mantissa between blocks, and integers that fall to the other side of .5 for it."""
    ids = jnp.asarray(np.random.default_rng(7).integers(0, 256, (rows, 8)), jnp.int32)
    scores = {}
    for schedule in ("launches", "layer_products"):
        run = bj.RunConfig(cache_dtype="float32", activation_bits=16, schedule=schedule)
        model = bj.load(f"synth:tiny-llama:{format}", run)
        assert model.params.step.schedule(rows) == schedule
        cache, lengths = kv.empty(model.config, model.run, rows, 8), jnp.ones(rows, jnp.int32)
        for i in range(8):
            out, cache = jitted.extend(model.params, cache, ids[:, i : i + 1], lengths, model.config)
        scores[schedule] = log_softmax(np.asarray(out[:, 0]))
    p, q = scores.values()
    kl = (np.exp(p) * (p - q)).sum(-1).max()
    print(f"{format}, {rows} rows: KL {kl:.1e}")
    assert kl < 1e-6


NEAR_TIE = 0.01  # nats between two tokens, below which either may come first
# KL at most, by the bits of a step's activations. 8: three times what they cost, 2e-4 to 3.5e-4; one token of
# 129 read as another costs 1.2e-3 to 2.7e-3, rope's angles 1 % off 2.5e-3. 16: prefill from the definition,
# below.
PREFILL_FROM_STEPS = {8: 1e-3, 16: 2e-4}
LAST = 64  # places of a text that it is the mean of


def greedy_by_steps(model, ids, n):
    """n greedy tokens behind a prompt that is read by decode steps, one token each, and the cache with all of
    them but the last."""
    state = bj.new_state(model, 1, len(ids) + n, GREEDY, n, ignore_eos=True)
    for token in ids:
        state = state.replace(tokens=jnp.array([token], jnp.int32), remaining=jnp.array([n], jnp.int32))
        state, _ = jitted.decode(model.params, state, model.config, limit=1, size=1)
    first = int(state.tokens[0])
    state, rest = jitted.decode(model.params, state, model.config, limit=n - 1, size=n - 1)
    return [first, *np.asarray(rest)[0].tolist()], state.cache


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where two greedy answers part, and how far their distributions are.

    at   the first of the new tokens that differs; None where none does
    gap  by how many nats steps prefer their own token there
    kl   mean KL(prefill || steps) behind the last tokens of the text that steps wrote
    """

    at: int | None
    gap: float
    kl: float


def prefill_from_steps(model, ids, new) -> Parting:
    """Greedy tokens by prefill and decode from those by steps alone, and how far the distributions are."""
    at_once = bj.generate(model, [ids], max_new_tokens=new, sampling=GREEDY, ignore_eos=True)[0].tokens
    by_steps, cache = greedy_by_steps(model, ids, new)
    text = ids + by_steps[:-1]  # the token behind its last is by_steps[-1]
    last = min(LAST, len(text))
    cache = cache.rewind(jnp.array([len(text) - last]))
    p, q = log_softmax(bj.logits(model, text)[-last:]), step_log_p(model, text[-last:], cache)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    at = next((i for i in range(new) if at_once[i] != by_steps[i]), None)
    if at is None:
        return Parting(None, 0.0, kl)
    log_p = q[at - new]
    return Parting(at, float(log_p[by_steps[at]] - log_p[at_once[at]]), kl)


@pytest.mark.parametrize("format", ["q1_0", "q4_k_m"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("length", [1, 16, 17, 127, 128, 129, 2047, 5000])  # the last in chunks
def test_prefill_and_decode_draw_what_steps_through_kernels_draw(length, bits, format):
    """Near-ties aside, the same greedy tokens. (The other tiny models write one token again and again.)

    Prefill of Q1_0 rounds activations as steps do, to 8 or 16 bits, that of other formats to float16. What
    also differs is attention, whose weights prefill rounds to 16 bits; behind it an activation may be
    rounded to the neighbouring whole number. With 16 bits that is less than what counts as a near-tie; there
    the comparison is strict. With 8 bits it may be as much as what they cost at all, a KL of 3.5e-4 on this
    model, which is what is bounded. Where tokens may part follows from the KL that was measured: noise of
    standard deviation s in each token's log-probability gives a KL of s^2 / 2, and the difference of two
    tokens, which decides who comes first, has noise of s sqrt(2), 0.037 nats there. 4 s = 4 sqrt(2 KL) is 2.8
    times that. (Steps by the definition on activations rounded to 8 bits, on a CPU: KL 2e-4 to 3e-4, parted
    in four of six texts, at 0.008 to 0.039 nats.)
    """
    model = bj.load(f"synth:tiny-llama:{format}", bj.RunConfig(activation_bits=bits, context=8192))
    assert model.params.layers.wo.parts[0].products.of(64).endswith("prefill_sm90")
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    found = prefill_from_steps(model, ids, 48)
    near = NEAR_TIE if bits == 16 else max(NEAR_TIE, 4 * (2 * found.kl) ** 0.5)
    print(f"{length} tokens, {bits} bits: {found}, near-ties are below {near:.3f} nats")
    assert found.kl < PREFILL_FROM_STEPS[bits]
    assert found.gap < near, f"token {found.at} differs, {found.gap:.3f} nats apart"


def test_a_row_keeps_its_bits_through_kernels_whatever_the_other_rows_hold():
    """At a fixed number of rows; other rows differ in prompt, length, seed and end."""
    model = bj.load("synth:tiny-qwen3:q1_0", bj.RunConfig(page_size=16))
    assert model.params.layers.wqkv[0].parts[0].tiled
    draw = lambda n, seed: np.random.default_rng(seed).integers(0, 256, n).tolist()  # noqa: E731
    mine, runs = draw(20, 5), []
    for seed, lengths, limits in ((6, (3, 31), (32, 32)), (7, (32, 18), (2, 9)), (8, (1, 1), (1, 32))):
        prompts = [draw(lengths[0], seed), mine, draw(lengths[1], seed + 10)]
        sampling = [bj.SamplingParams(seed=s) for s in (seed, 1, seed + 1)]
        new = [limits[0], 32, limits[1]]
        state = bj.new_state(model, 3, 256, sampling, new, ignore_eos=True)
        state = jitted.prefill(model.params, state, *padded(prompts, 32), model.config)
        state, drawn = jitted.decode(model.params, state, model.config, limit=24, size=24)
        pages = state.cache.block_table[1]
        runs.append((drawn[1], state.cache.k[:, pages], state.cache.v[:, pages]))
    for other in runs[1:]:
        for one, another in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(one, another)


def test_kernel_steps_update_the_cache_in_place():
    model = bj.load("synth:tiny-qwen3:q1_0")
    state = bj.new_state(model, 1, 2048, bj.SamplingParams(temperature=0.0), 64, ignore_eos=True)
    state = jitted.prefill(model.params, state, *padded([list(range(20))]), model.config)
    before = state.cache.k.unsafe_buffer_pointer()
    compiled = jitted.decode.lower(model.params, state, model.config, limit=4, size=8).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.cache.k.nbytes
    after, _ = jitted.decode(model.params, state, model.config, limit=4, size=8)
    assert state.cache.k.is_deleted() and after.cache.k.unsafe_buffer_pointer() == before


@pytest.mark.parametrize(("kernel", "bits"), [("q1_prefill_sm90", 8), ("q1_prefill_sm90", 16), ("cublas", 8)])
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        (64, 256, 9, "plain"),
        (960, 896, 200, "normed"),  # neither whole tiles of outputs nor of tokens, nor whole pairs of groups
        (1013, 512, 70, "plain"),  # as many as no instruction likes
        (4096, 4096, 512, "added"),
        (2560, 2560, 300, "gated"),
        (4096, 12288, 640, "added"),
        (4096, 4096, 16, "added"),  # columns in splits
        (1013, 12288, 33, "plain"),
        (6144, 4096, 64, "normed"),
        (2560, 2560, 17, "gated"),
    ],
)
def test_many_rows_of_1_bit_weights_are_their_definition(N, K, rows, kind, kernel, bits):
    rng = np.random.default_rng(N + rows)
    layers, layer = 3, 2
    stacks = []
    for seed in range(2 if kind == "gated" else 1):
        fields = formats.random_fields("q1_0", jax.random.key(seed), (layers, N, K // 128), 0.0, 0.02)
        products = Products(((None, kernel),), bits)
        stacks.append(tile(QTensor(fields, "q1_0", (N, K))).replace(products=products))
    # Whole numbers, the largest in each group, times a power of two for each row: codes hold them exactly, of
    # 8 bits float16 too.
    top = 2 ** (bits - 1) - 1
    x = rng.integers(-top, top + 1, (rows, K))
    x[:, 5::128] = top
    x = x * 2.0 ** rng.integers(-40, 20, (rows, 1))
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    dense = [np.asarray(dequantize(w[layer]), np.float64) for w in stacks]
    x32 = jnp.asarray(x, jnp.float32)
    options = {"plain": {}, "normed": {"gamma": jnp.ones((layers, K)), "eps": 1e-6}, "gated": {}}
    if kind == "gated":
        x32 = jnp.asarray(np.sign(x), jnp.float32)  # so that its norm is exact
        gate, up = (LayerStack((w,), tuple((0, i) for i in range(layers))) for w in stacks)
        run = jax.jit(lambda x: gated(x, gate, up, layer, gamma=jnp.ones((layers, K)), eps=0.0))
        want = [np.sign(x) / np.sqrt((np.sign(x) ** 2).mean(-1, keepdims=True)) @ w.T for w in dense]
        want = want[0] / (1 + np.exp(-want[0])) * want[1]
    else:
        more = {"residual": jnp.asarray(residual)} if kind == "added" else options[kind]
        run = jax.jit(lambda x: matmul(x, stacks[0], layer, **more))
        norm = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) if kind == "normed" else 1.0
        want = (x / norm) @ dense[0].T + (residual if kind == "added" else 0)
    got = [np.asarray(run(x32)) for _ in range(3)]
    # The kernel's sums of a group are exact. In the library's, tensor cores cut off what they add to a sum,
    # which shows the more the longer it is, and rows behind a norm are rounded to float16.
    limit = 5e-6
    if kernel == "cublas":
        limit = limit * max(1, K / 4096) if kind in ("plain", "added") else 1e-3
    for row_got, row_want in zip(got[0], want, strict=True):  # rows differ by many orders of magnitude
        assert np.linalg.norm(row_got - row_want) < limit * np.linalg.norm(row_want)
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])


@pytest.mark.parametrize("format", formats.names("kq"))
@pytest.mark.parametrize(
    ("N", "K", "rows", "kind"),
    [
        (64, 256, 17, "plain"),
        (904, 768, 200, "normed"),  # neither whole tiles of outputs nor of tokens
        (1013, 512, 70, "added"),
        (4096, 4096, 512, "added"),
        (4096, 1024, 2000, "added"),
        (2560, 2560, 300, "gated"),
        (1000, 12288, 640, "added"),
        (4096, 4096, 17, "added"),  # columns in splits
        (1013, 12288, 33, "plain"),
        (2560, 2560, 64, "gated"),
    ],
)
def test_many_rows_of_integer_weights_are_their_definition(N, K, rows, kind, format):
    """Of the weights rounded to float16, which the kernel has too, but where a scale is not float16 in the
    file."""
    if device.platform() != "sm_90":
        pytest.skip("needs Hopper's tensor core instructions")
    rng = np.random.default_rng(N + rows)
    layers, layer = 3, jnp.int32(2)
    lead = (layers, N, K // formats.get(format).WEIGHTS)
    stacks = []
    for seed in range(2 if kind == "gated" else 1):
        fields = formats.random_fields(format, jax.random.key(seed), lead, 0.0, 0.02)
        stacks.append(for_device(QTensor(fields, format, (N, K)), matrices=1 + (kind == "gated")))
    x = rng.integers(-2047, 2048, (rows, K))  # float16 holds them exactly
    x[:, 5::128] = 2047
    x = x * 2.0 ** rng.integers(-40, 20, (rows, 1))
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    dense = [np.asarray(dequantize(w[2])).astype(np.float16).astype(np.float64) for w in stacks]
    gamma = {"gamma": jnp.ones((layers, K)), "eps": 0.0}
    if kind == "gated":
        x = np.sign(x) + (x == 0)  # so that its norm is exact
        gate, up = (LayerStack((w,), tuple((0, i) for i in range(layers))) for w in stacks)
        run = jax.jit(lambda x, layer: gated(x, gate, up, layer, **gamma))
        want = [x @ w.T for w in dense]
        want = want[0] / (1 + np.exp(-want[0])) * want[1]
    else:
        more = {"plain": {}, "normed": gamma, "added": {"residual": jnp.asarray(residual)}}[kind]
        run = jax.jit(lambda x, layer: matmul(x, stacks[0], layer, **more))
        norm = np.sqrt((x**2).mean(-1, keepdims=True)) if kind == "normed" else 1.0
        want = (x / norm) @ dense[0].T + (residual if kind == "added" else 0)
    got = [np.asarray(run(jnp.asarray(x, jnp.float32), layer)) for _ in range(3)]
    limit = 2.0**-24 * (K / 16 + 4)  # of 16 products at a time tensor cores cut off what they add to a sum
    if kind in ("normed", "gated"):  # rows behind a norm are rounded to float16
        limit = 1e-3
    elif not has_float16_scales(format):
        limit = 6e-4
    for row_got, row_want in zip(got[0], want, strict=True):  # rows differ by many orders of magnitude
        assert np.linalg.norm(row_got - row_want) < limit * np.linalg.norm(row_want)
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[0], got[2])


@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
def test_prompts_read_a_cache_of_bytes(impl):
    problem = problems.Attention(device.platform(), "prefill", 32, 8, 128, 64, "int8")
    if reason := selection.CANDIDATES[problems.Attention][impl].refuses(problem):
        pytest.skip(reason)
    rng, B, T, depth = np.random.default_rng(6), 2, 300, 100
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    empty = cache_layouts.empty("int8", (2, 16, 64, 8, 128))
    pages = [cache_layouts.write(empty, draw(2, 16, 64, 8, 128), ()) for _ in range(2)]
    table = jnp.asarray(rng.permutation(16).reshape(B, 8), jnp.int32)
    positions = np.where(np.arange(T) < np.array([[T], [7]]), depth + np.arange(T), -1)
    angle = jnp.asarray(positions[..., None] * 10000.0 ** (-np.arange(64) / 64), jnp.float32)
    rest = {"rotation": (jnp.cos(angle), jnp.sin(angle)), "interleaved": False, "norms": (None, None)}
    rest |= {"eps": 1e-6, "num_keys": T + depth}
    args = (draw(B, T, 48 * 128), *pages, table, jnp.asarray(positions, jnp.int32))
    want, got = (
        jax.jit(lambda *a, impl=impl: attend(*a, 1, **rest, prefill_impl=impl))(*args)
        for impl in ("reference", impl)
    )
    for a, b in zip(jax.tree.leaves(got[1:3]), jax.tree.leaves(want[1:3]), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert jnp.linalg.norm(got[0] - want[0]) < 1.024 * ROUNDING["float16"] * jnp.linalg.norm(want[0])


@pytest.mark.parametrize(
    ("H", "Hkv", "D", "B", "T", "depth", "page_size"),
    [
        (32, 8, 128, 1, 512, 0, 64),
        (32, 8, 128, 3, 100, 300, 64),  # ragged, and behind what the cache holds
        (9, 3, 64, 1, 200, 64, 64),
        (14, 2, 64, 2, 129, 1, 128),
        (16, 8, 128, 2, 2, 0, 64),
        (8, 8, 64, 1, 300, 77, 16),
        (24, 4, 256, 2, 300, 77, 64),
        (6, 1, 256, 1, 129, 0, 128),
    ],
)
@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
@pytest.mark.parametrize("layout", AS_THEY_LIE)
def test_many_queries_attend_as_the_reference_does(layout, H, Hkv, D, B, T, depth, page_size, impl):
    from pallas_kernels import attention
    from pallas_kernels.attention.prefill_sm80 import mma_attention
    from pallas_kernels.attention.prefill_sm90 import prefill_attention

    kernel = {"prefill_sm90": prefill_attention, "prefill_sm80": mma_attention}[impl]
    sizes = (H, Hkv, D, page_size, layout)
    problem = problems.Attention(device.platform(), "prefill", *sizes)
    if reason := selection.CANDIDATES[problems.Attention][impl].refuses(problem):
        pytest.skip(reason)
    rng = np.random.default_rng(H + T)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    pages = -(-(T + depth) // page_size) + 1
    dtype = cache_layouts.get(layout).DTYPE
    q = draw(B, T, H, D).astype(dtype).astype(jnp.float32)
    k_pages, v_pages = (draw(2, B * pages, page_size, Hkv, D).astype(dtype) for _ in range(2))
    table = jnp.asarray(rng.permutation(B * pages).reshape(B, pages), jnp.int32)
    lengths = np.array([T, 1, 0][:B])
    positions = np.where(np.arange(T) < lengths[:, None], depth + np.arange(T), -1)
    args = (q, k_pages, v_pages, table, jnp.asarray(positions, jnp.int32), 1)
    want = np.asarray(attention(*args, num_keys=T + depth))
    got = [np.asarray(kernel(*args)) for _ in range(2)]
    np.testing.assert_allclose(got[0], want, atol=5.12 * ROUNDING[layout], rtol=0)
    assert np.linalg.norm(got[0] - want) < 1.024 * ROUNDING[layout] * np.linalg.norm(want)
    assert (got[0][positions < 0] == 0).all()
    np.testing.assert_array_equal(got[0], got[1])


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-qwen2"])
@pytest.mark.parametrize(
    ("format", "bits", "most"), [("q1_0", 8, 5e-3), ("q1_0", 16, 2e-4), ("q4_k_m", 8, 2e-4)]
)
def test_prefill_is_near_the_exact_definition(name, format, bits, most):
    """Both with the same cache: what is measured is activations of 8 or 16 bits, or GEMMs in float16, and
    attention with rounded weights."""
    ids = np.random.default_rng(3).integers(0, 256, 700).tolist()
    fast, exact = (
        bj.logits(bj.load(f"synth:{name}:{format}", bj.RunConfig(impl=impl, activation_bits=bits)), ids)
        for impl in ("auto", "reference")
    )
    assert exact.std() > 2
    p, q = log_softmax(exact), log_softmax(fast)
    kl = (np.exp(p) * (p - q)).sum(-1).mean()
    print(f"{name} {format}, {bits} bits: KL {kl:.2e}")
    assert 0 < kl < most
