"""extend, rewind and take; and what functions of arrays say to arguments that cannot be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted

GREEDY = bj.SamplingParams(temperature=0.0)
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 256, (3, 40))


@functools.cache
def tiny(cache_dtype="float32") -> bj.Model:
    return bj.load(
        "synth:tiny-qwen3:q8_0", bj.RunConfig(page_size=16, cache_dtype=cache_dtype, impl="reference")
    )


@functools.cache
def whole() -> np.ndarray:
    """float32 [3, 40, V]: by forward, which has no pages."""
    model = tiny()
    logits, _ = jitted.forward(model.params, jnp.array(IDS), jnp.array([40] * 3), model.config)
    return np.asarray(logits)


def read(cache, rows):
    """These tokens of each row, at most 16: their logits, row by row."""
    tokens, model = np.zeros((len(rows), 16), np.int32), tiny()
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.array([*map(len, rows)])
    logits, cache = jitted.extend(model.params, cache, jnp.array(tokens), lengths, model.config)
    return [np.asarray(logits)[row, : len(ids)] for row, ids in enumerate(rows)], cache


def extended(cache, spans):
    """Read IDS[row, first:last] of each row; the logits of those tokens, row by row."""
    return read(cache, [IDS[row, first:last] for row, (first, last) in enumerate(spans)])


def check(got, spans):
    for row, (first, last) in enumerate(spans):
        np.testing.assert_allclose(got[row], whole()[row, first:last], atol=2e-4)


def test_rows_are_extended_by_any_number_of_tokens_each():
    cache = bj.new_cache(tiny(), batch_size=3, context=48)
    for spans in ([(0, 5), (0, 0), (0, 16)], [(5, 6), (0, 9), (16, 16)], [(6, 20), (9, 10), (16, 30)]):
        got, cache = extended(cache, spans)
        check(got, spans)
    assert cache.lengths.tolist() == [20, 10, 30]


def test_a_rewound_cache_goes_on_from_there():
    cache = bj.new_cache(tiny(), batch_size=3, context=48)
    _, cache = extended(cache, [(0, 16), (5, 12), (0, 16)])
    cache = cache.rewind([9, 0, 99])
    assert cache.lengths.tolist() == [9, 0, 16]
    spans = [(9, 20), (0, 16), (16, 17)]
    got, cache = extended(cache, spans)
    check(got, spans)


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_taken_rows_have_pages_of_their_own(cache_dtype):
    """Rows 2, 0, 0 of a cache: each goes on with tokens of its own, and the cache that they came of too."""
    model = tiny(cache_dtype)
    _, cache = extended(bj.new_cache(model, batch_size=3, context=48), [(0, 16), (0, 7), (0, 13)])
    _, cache = extended(cache, [(16, 20), (7, 7), (13, 13)])
    taken = cache.take([2, 0, 0])
    assert taken.lengths.tolist() == [13, 20, 20]
    assert len(np.unique(np.asarray(taken.block_table))) == taken.block_table.size
    got, taken = read(taken, [[1], [2], [3]])
    for row, source in enumerate([2, 0, 0]):
        beside = [[row + 1] if other == source else [0] for other in range(3)]
        want, _ = read(jax.tree.map(jnp.copy, cache), beside)  # which is donated
        np.testing.assert_array_equal(got[row], want[source])


def test_jitted_functions_compile_once_and_donate():
    model = tiny()
    state = bj.new_state(model, 2, 64, GREEDY, 8, ignore_eos=True)
    before = state
    state = jitted.prefill(
        model.params, state, jnp.array(IDS[:2, :16]), jnp.array([16, 3]), model.config
    ).state
    assert before.cache.states["attention"][0].k.is_deleted()
    size = jitted.step._cache_size()
    for _ in range(3):
        state = jitted.step(model.params, state, model.config).state
    assert jitted.step._cache_size() == size + 1
    drawn = jitted.decode(model.params, state, model.config, limit=3, size=4).tokens
    assert (drawn[:, :3] >= 0).all() and (drawn[:, 3] == -1).all()


def test_config_and_taps_need_not_be_named_static():
    """jax.jit, jax.vmap and jax.grad take the functions as they are."""
    model, ids, lengths = tiny(), jnp.array(IDS[:2, :16]), jnp.array([9, 5])
    state = bj.new_state(model, 2, 64, GREEDY, 8, ignore_eos=True)
    state = jax.jit(bj.prefill, donate_argnums=1)(model.params, state, ids, lengths, model.config).state
    state = jax.jit(bj.step, donate_argnums=1)(model.params, state, model.config).state
    assert state.cache.lengths.tolist() == [10, 6]
    taps = bj.Taps("mlp")
    one_by_one = jax.jit(jax.vmap(bj.forward, in_axes=(None, 0, 0, None)))
    logits, _ = one_by_one(model.params, ids[:, None], lengths[:, None], model.config)
    want, kept = jax.jit(bj.forward)(model.params, ids, lengths, model.config, taps=taps)
    np.testing.assert_allclose(logits[:, 0, :5], want[:, :5], atol=1e-4)
    assert set(kept) == {"mlp"}


def test_lists_are_arrays():
    model = tiny()
    logits, _ = bj.forward(model.params, [[1, 2, 3]], [3], model.config)
    np.testing.assert_allclose(logits[0], bj.logits(model, [1, 2, 3]), atol=1e-4)


@pytest.mark.parametrize(
    "tokens, lengths, error, message",
    [
        ([1, 2, 3], [3], ValueError, r"tokens have shape \(3,\); expected ids \[rows, tokens\]"),
        ([[1, 2, 3]], 3, ValueError, r"lengths are int32 \(\); expected int32 \(1,\)"),
        ([[1, 2, 3]], [3, 3], ValueError, r"lengths are int32 \(2,\); expected int32 \(1,\)"),
        ([[1, 2, 3]], [3.0], ValueError, r"lengths are float32 \(1,\)"),
        ([[[1.0, 2.0]]], [1], ValueError, r"expected vectors \[rows, tokens, 256\]"),
        ([[True]], [1], TypeError, "tokens are bool; expected int32 ids, or float32 vectors"),
    ],
)
def test_shapes_that_cannot_be(tokens, lengths, error, message):
    with pytest.raises(error, match=message):
        bj.forward(tiny().params, tokens, lengths, tiny().config)


def test_a_model_is_no_config():
    with pytest.raises(TypeError, match=r"config is a Model; give model\.config"):
        bj.forward(tiny().params, [[1]], [1], tiny())


def test_rows_that_differ_from_the_caches():
    model = tiny()
    with pytest.raises(ValueError, match="tokens have 2 rows, but the cache has 3"):
        bj.extend(model.params, bj.new_cache(model, 3, 16), [[1], [2]], [1, 1], model.config)


def test_values_are_checked_where_that_is_asked_for():
    model = tiny()
    # Of the jitted one too, which was traced without checks.
    forward, extend, step = bj.checked(bj.jitted.forward), bj.checked(bj.extend), bj.checked(bj.step)
    ids, lengths = jnp.array([[1, 2, 3]]), jnp.array([3])
    logits, _ = forward(model.params, ids, lengths, model.config)
    np.testing.assert_allclose(logits, bj.forward(model.params, ids, lengths, model.config)[0], atol=1e-5)
    with pytest.raises(ValueError, match="lengths: 5 to 5 are not within 0 to 3"):
        forward(model.params, ids, jnp.array([5]), model.config)
    with pytest.raises(ValueError, match="tokens: ids from 1 to 512, but the vocabulary has 512"):
        forward(model.params, jnp.array([[1, 2, 512]]), lengths, model.config)
    cache = bj.new_cache(model, 1, 16)
    with pytest.raises(ValueError, match="a row would have 17 tokens, but the cache has room for 16"):
        extend(model.params, cache, jnp.ones((1, 17), jnp.int32), jnp.array([17]), model.config)
    state = bj.new_state(model, 1, 16, GREEDY, 99, ignore_eos=True)
    state = state.replace(cache=state.cache.replace(lengths=jnp.array([16])))
    with pytest.raises(ValueError, match="a row's cache is full; make the state with a larger context"):
        step(model.params, state, model.config)


def test_unchecked_programs_hold_no_checks():
    model = tiny()
    program = jax.make_jaxpr(functools.partial(bj.forward, config=model.config))
    assert not program(model.params, jnp.array([[1, 2, 3]]), jnp.array([3])).effects


@pytest.mark.parametrize("source", ["tiny-qwen3:q8_0", "tiny-qwen35:q8_0"])
def test_hidden_states_are_what_extend_reads_with_what_taps_read(source):
    """In two pieces and then token by token, on CPU kernels: the logits of extend, and the activations
    of forward."""
    model = bj.load(f"synth:{source}", bj.RunConfig(page_size=16, cache_dtype="float32", activation_bits=16))
    taps, params, config = bj.Taps({"output", "hidden"}, layers=[0, 2]), model.params, model.config
    ids, pieces = jnp.array(IDS[:2, :19]), [(0, 9), (9, 17), (17, 18), (18, 19)]
    cache, other = (bj.new_cache(model, batch_size=2, context=32, rewinds=True) for _ in range(2))
    kept = []
    for first, last in pieces:
        lengths = jnp.full(2, last - first)
        arguments = ids[:, first:last], lengths, config
        hidden, cache, read = jitted.hidden_states(params, cache, *arguments, taps=taps)
        want, other = jitted.extend(params, other, *arguments)
        logits = jax.jit(bj.unembed, static_argnums=2)(params, hidden, config)
        np.testing.assert_allclose(logits, want, atol=1e-5)
        kept.append(read)
    _, want = jitted.forward(params, ids, jnp.full(2, 19), config, taps=taps)
    assert set(want) == {"output", "hidden"} and cache.lengths.tolist() == [19, 19]
    for site, x in want.items():
        got = np.concatenate([read[site] for read in kept], axis=2)
        np.testing.assert_allclose(got, x, atol=2e-4, err_msg=site)


def test_hidden_states_of_the_first_layers():
    model = tiny()
    arguments = jnp.array(IDS[:1, :8]), jnp.array([8]), model.config
    cache = bj.new_cache(model, batch_size=1, context=16)
    hidden, _, _ = jitted.hidden_states(model.params, cache, *arguments, stop_at_layer=2)
    want, _ = jitted.forward(model.params, *arguments, stop_at_layer=2, logits=False)
    np.testing.assert_allclose(hidden, want, atol=1e-5)


def test_more_tokens_than_a_ring_of_pages_takes_are_refused():
    model = bj.load("synth:tiny-gemma3:q8_0", bj.RunConfig(page_size=16))
    cache = bj.new_cache(model, batch_size=1, context=1024)
    width = cache.chunk + 1
    with pytest.raises(ValueError, match=rf"tokens: {width} of each row, but this cache takes {cache.chunk}"):
        bj.hidden_states(
            model.params, cache, jnp.zeros((1, width), jnp.int32), jnp.array([width]), model.config
        )
