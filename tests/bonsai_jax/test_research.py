"""What notebooks build on: reading and editing activations, gradients on a frozen quantized base."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import decoder, rope, taps
from bonsai_jax.network.kinds import mlp
from bonsai_jax.network.kinds.place import Place
from pallas_kernels import dequantize

IDS = np.random.default_rng(0).integers(0, 256, 21)
LAYER, SITE = 1, "middle"


@functools.cache
def tiny(source="tiny-qwen3:q1_0") -> bj.Model:
    return bj.load(f"synth:{source}", bj.RunConfig(page_size=16, weights="packed", activation_bits=16))


def forward(model, tokens=IDS, taps=None):
    """Logits [T, V] and what was read, [L, T, H], of one sequence."""
    tokens = jnp.asarray(tokens)[None]
    lengths = jnp.array([tokens.shape[1]])
    run = jax.jit(functools.partial(bj.forward, config=model.config, taps=taps))
    logits, kept = run(model.params, tokens, lengths)
    return logits[0], {name: x[:, 0] for name, x in kept.items()}


@functools.cache
def everything(source="tiny-qwen3:q1_0"):
    """Logits, and what is read at every site."""
    return forward(tiny(source), taps=bj.Taps(taps.SITES))


@pytest.mark.parametrize("source", ["tiny-qwen3:q1_0", "tiny-llama:q8_0"])
def test_what_is_read_adds_up(source):
    model, (logits, kept) = tiny(source), everything(source)
    np.testing.assert_allclose(logits, bj.logits(model, IDS), atol=1e-4)
    assert kept["input"].shape == (model.config.num_layers, len(IDS), model.config.hidden)
    np.testing.assert_array_equal(kept["input"][0], bj.embed(model.params, jnp.asarray(IDS)))
    np.testing.assert_array_equal(kept["input"][1:], kept["output"][:-1])
    np.testing.assert_allclose(kept["input"] + kept["attention"], kept["middle"], atol=1e-5)
    np.testing.assert_allclose(kept["middle"] + kept["mlp"], kept["output"], atol=1e-5)
    again = decoder.unembed(model.params, kept["output"][-1], model.config)
    np.testing.assert_allclose(again, logits, atol=1e-4)


def test_what_is_not_tapped_costs_nothing():
    """Without taps, or with idle ones, the same program; a tap adds its own site and no other."""
    model = tiny()
    c, tokens, lengths = model.config, jnp.asarray(IDS)[None], jnp.array([len(IDS)])

    def program(tapping):
        run = functools.partial(bj.forward, config=c, taps=tapping)
        return str(jax.make_jaxpr(run)(model.params, tokens, lengths))

    plain = program(None)
    assert program(bj.Taps()) == plain
    L, T, H, D = c.num_layers, len(IDS), c.attention.num_heads, c.attention.head_dim
    sites = {
        "mlp": (T, c.hidden),
        "hidden": (T, c.mlp.ffn),
        "z": (T, H, D),
        "rot_k": (T, c.attention.num_kv_heads, D),
        "pattern": (H, T, T),
    }
    shapes = {name: ",".join(map(str, (L, 1, *shape))) for name, shape in sites.items()}
    assert len(set(shapes.values())) == len(sites) and not any(f"f32[{s}]" in plain for s in shapes.values())
    for name in sites:
        reading = program(bj.Taps(name))
        assert {other for other, s in shapes.items() if f"f32[{s}]" in reading} == {name}


weights_of = jax.jit(lambda stack, index: dequantize(stack[index]))


def by_hand(model, x):
    """Attention and feed-forward of layer LAYER, numpy in float64, from the residual stream [T, H] of its
    input. Weights as their formats say they are, which test_formats holds against gguf."""
    c, a, T = model.config, model.config.attention, len(x)
    (w,), (w_mlp,) = model.params.layers["attention"], model.params.layers["mlp"]

    def norm(x, gamma):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps) * np.asarray(gamma, np.float64)

    def weight(stack):
        part, index = stack.where[LAYER]
        return np.asarray(weights_of(stack.parts[part], index), np.float64)

    def turn(x):  # [T, heads, D]: pairs as complex numbers
        i = a.rope.interleaved
        z = x[..., 0::2] + 1j * x[..., 1::2] if i else x[..., : D // 2] + 1j * x[..., D // 2 :]
        z = a.rope.mscale * z * np.exp(1j * np.arange(T)[:, None, None] * theta)
        return np.stack([z.real, z.imag], -1).reshape(x.shape) if i else np.concatenate([z.real, z.imag], -1)

    D, H, Hkv = a.head_dim, a.num_heads, a.num_kv_heads
    theta = rope.frequencies(a.rope).astype(np.float64)  # test_rope has its own oracles
    n = norm(x, w.norm[LAYER])
    qkv = np.concatenate([n @ weight(stack).T for stack in w.qkv], axis=-1)
    qkv = (qkv if w.qkv_bias is None else qkv + np.asarray(w.qkv_bias[LAYER], np.float64)).reshape(T, -1, D)
    q, k, v = qkv[:, :H], qkv[:, H:-Hkv], qkv[:, -Hkv:]
    normed = (norm(q, w.q_norm[LAYER]), norm(k, w.k_norm[LAYER])) if w.q_norm is not None else (q, k)
    rot_q, rot_k = map(turn, normed)
    keys, values = (np.repeat(a, H // Hkv, axis=1) for a in (rot_k, v))
    scores = np.einsum("thd,shd->hts", rot_q, keys) / np.sqrt(D)
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    pattern = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    z = np.einsum("hts,shd->thd", pattern, values)
    attention = z.reshape(T, -1) @ weight(w.o).T
    n = norm(x + attention, w_mlp.norm[LAYER])
    gate = n @ weight(w_mlp.gate).T
    hidden = gate / (1 + np.exp(-gate)) * (n @ weight(w_mlp.up).T)
    added = hidden @ weight(w_mlp.down).T
    return {
        "q": q, "k": k, "v": v, "rot_q": rot_q, "rot_k": rot_k, "scores": scores, "pattern": pattern, "z": z,
        "attention": attention, "hidden": hidden, "mlp": added,
    }  # fmt: skip


# QK-norm, biases, interleaved rope
@pytest.mark.parametrize("source", ["tiny-qwen3:q1_0", "tiny-qwen2:q4_k", "tiny-llama:q8_0"])
def test_every_site_against_float64(source):
    model, (_, kept) = tiny(source), everything(source)
    assert kept.keys() == {*taps.SITES} - {"router", "experts", "expert_weights"}
    for name, want in by_hand(model, np.asarray(kept["input"][LAYER], np.float64)).items():
        np.testing.assert_allclose(
            kept[name][LAYER], want, rtol=1e-4, atol=1e-4 * np.nanstd(want[np.isfinite(want)]), err_msg=name
        )


def test_editing_inside_attention():
    """A key hidden from the scores or from the pattern, a head without output: each what arithmetic says."""
    model, (_, plain) = tiny(), everything()

    def hide(name, layer, x):
        """Key 2 of layer LAYER."""
        key = (layer == LAYER) & (jnp.arange(x.shape[-1]) == 2)
        return jnp.where(key, -jnp.inf if name == "scores" else 0.0, x)

    hidden = {at: forward(model, taps=bj.Taps(taps.SITES, hide, {at}))[1] for at in ("scores", "pattern")}
    want = np.array(plain["pattern"][LAYER])
    want[..., 2] = 0
    np.testing.assert_allclose(hidden["pattern"]["pattern"][LAYER], want, atol=1e-6)
    total = want.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        hidden["scores"]["pattern"][LAYER], want / np.where(total, total, 1), atol=1e-5
    )
    group = model.config.attention.num_heads // model.config.attention.num_kv_heads
    v = np.repeat(plain["v"][LAYER], group, axis=1)
    z = np.einsum("hts,shd->thd", want, v)
    np.testing.assert_allclose(hidden["pattern"]["z"][LAYER], z, atol=1e-5)

    def negate(name, layer, x):
        return jnp.where(layer == LAYER, -x, x)

    _, negated = forward(model, taps=bj.Taps(taps.SITES, negate, {"hidden", "v"}))
    np.testing.assert_allclose(negated["attention"][LAYER], -plain["attention"][LAYER], atol=1e-5)
    np.testing.assert_array_equal(negated["v"][LAYER], -plain["v"][LAYER])
    _, only = forward(model, taps=bj.Taps(taps.SITES, negate, "hidden"))
    np.testing.assert_allclose(only["mlp"][LAYER], -plain["mlp"][LAYER], atol=1e-5)


def test_gradients_reach_the_attention_weights():
    """Of padded rows too, whose queries see keys that a finite difference sees as well."""
    model = tiny("tiny-llama:q8_0")
    tokens, lengths = jnp.asarray(IDS[:16]).reshape(2, 8), jnp.array([8, 5])

    def loss(push):
        tapping = bj.Taps(edit=lambda name, layer, x: x + push[layer], at="scores")
        logits, _ = bj.forward(model.params, tokens, lengths, model.config, taps=tapping)
        return jax.nn.logsumexp(logits, -1)[jnp.arange(2), jnp.array([7, 4])].sum()

    zero = jnp.zeros((model.config.num_layers, model.config.attention.num_heads, 8, 8))
    both = jax.jit(jax.value_and_grad(loss))
    _, gradient = both(zero)
    assert jnp.isfinite(gradient).all() and not jnp.triu(gradient, 1).any()
    along, step = gradient / jnp.linalg.norm(gradient), 0.02
    difference = (both(step * along)[0] - both(-step * along)[0]) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(gradient, along), difference, rtol=0.02)


def test_what_a_kernel_keeps_to_itself_and_what_is_split_over_devices():
    model = tiny()
    state = bj.new_state(model, 1, 64, bj.SamplingParams(temperature=0.0), 5)
    (stored,) = state.cache.states["attention"]
    stored = stored.replace(impl="decode", prefill_impl="prefill_sm90")
    on_kernels = state.replace(cache=state.cache.with_state("attention", 0, stored))

    def step(state, params=model.params, at=("pattern", "z")):
        tapping = bj.Taps(edit=lambda name, layer, x: x, at=at)
        jax.eval_shape(lambda state: bj.step(params, state, model.config, taps=tapping), state)

    step(state)
    with pytest.raises(NotImplementedError) as error:
        step(on_kernels)
    assert str(error.value) == (
        "Taps: pattern: here the kernel decode computes attention and keeps them to itself; with it all "
        "but rot_q, rot_k, scores, pattern can be tapped. "
        'bj.forward has all, as has a model loaded with RunConfig(impl="reference")'
    )
    with pytest.raises(
        NotImplementedError, match=r'hidden: each device has some .* axis "model" input, atten'
    ):
        jax.shard_map(
            lambda: step(state, model.params.replace(axis="model"), "hidden"),
            mesh=jax.make_mesh((1,), ("model",)), in_specs=(), out_specs=None,
        )()  # fmt: skip


def test_an_edit_is_what_recomputation_says():
    """Steering the residual stream in one layer: the layers above see it, those below do not, and the rest of
    the model, run by hand from the edited stream, gives the same logits."""
    model, c = tiny(), tiny().config
    vector = jnp.asarray(np.random.default_rng(1).normal(0, 3, c.hidden), jnp.float32)

    def steer(name, layer, x):
        return jnp.where(layer == LAYER, x + vector, x) if name == SITE else x

    plain, before = everything()
    steered, after = forward(model, taps=bj.Taps(taps.SITES, steer))
    assert jnp.abs(plain - steered).max() > 1
    np.testing.assert_array_equal(after["input"][: LAYER + 1], before["input"][: LAYER + 1])
    np.testing.assert_allclose(after[SITE][LAYER], before[SITE][LAYER] + vector, atol=1e-5)
    place = Place(
        c.mlp,
        model.params.layers["mlp"][0],
        0,
        LAYER,
        c.rms_norm_eps,
        jnp.arange(len(IDS))[None],
        {},
        len(IDS),
    )
    x, *_ = mlp.block((before[SITE][LAYER] + vector)[None], place, None, None)
    np.testing.assert_allclose(after["output"][LAYER], x[0], atol=1e-4)

    def replace(name, layer, x_):  # what enters the layer above is the stream made by hand
        return jnp.where(layer == LAYER + 1, x, x_) if name == "input" else x_

    np.testing.assert_allclose(forward(model, taps=bj.Taps(edit=replace))[0], steered, atol=1e-3)


def test_a_steered_generation_is_the_argmax_of_steered_logits():
    """Where attention is its reference, at every site."""
    model = tiny()
    inside = ("q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z", "hidden")
    vector = jnp.asarray(np.random.default_rng(2).normal(0, 3, model.config.hidden), jnp.float32)

    def run(strength):
        def edit(name, layer, x):
            by = strength * (layer == LAYER)
            return x + by * vector if name == "output" else x * (1 - by)

        taps = bj.Taps(edit=edit, at={"output", *inside})
        state = bj.new_state(model, 1, 64, bj.SamplingParams(temperature=0.0), 9, ignore_eos=True)
        tokens, lengths = jnp.asarray(IDS)[None], jnp.array([len(IDS)])
        state, first, _ = bj.prefill(model.params, state, tokens, lengths, model.config, taps=taps)
        rest = bj.decode(model.params, state, model.config, limit=8, size=8, taps=taps).tokens
        drawn = jnp.concatenate([first, rest[0]])
        logits, _ = bj.forward(
            model.params, jnp.concatenate([tokens[0], drawn])[None], lengths + 9, model.config, taps=taps
        )
        return drawn, logits[0, len(IDS) - 1 : -1].argmax(-1)

    (plain, _), (steered, forced) = (jax.jit(run)(strength) for strength in (0.0, 0.75))
    assert steered.tolist() == forced.tolist() != plain.tolist()


def test_a_name_that_there_is_not():
    assert bj.Taps("output") == bj.Taps({"output"})  # one name, and not its letters
    with pytest.raises(ValueError, match="at names 'hook_z'; there are input, attention, middle, mlp"):
        bj.Taps(at=["z", "hook_z"])
    with pytest.raises(ValueError, match="read names 'residual'; there are input, attention, middle"):
        bj.Taps(frozenset({"residual"}))
    with pytest.raises(TypeError, match=r"taps is a str; give bj\.Taps"):
        forward(tiny(), taps="output")


@pytest.mark.parametrize("edited", [lambda x: None, lambda x: x[:, :1], lambda x: x.astype(jnp.float16)])
def test_an_edit_returns_what_it_was_given_the_like_of(edited):
    taps = bj.Taps(edit=lambda name, layer, x: edited(x))
    with pytest.raises(ValueError, match=r"Taps: edit returned .* for 'input'; expected float32 \("):
        forward(tiny(), taps=taps)


@pytest.mark.parametrize(
    "source", ["tiny-qwen3:q1_0", pytest.param("tiny-qwen2:q4_k", marks=pytest.mark.slow)]
)
def test_gradients_with_respect_to_a_soft_prompt(source):
    """Against central differences of the loss, along random directions and along the gradient."""
    model = tiny(source)
    embedded = bj.embed(model.params, jnp.asarray(IDS))
    soft = jnp.asarray(np.random.default_rng(3).normal(0, 1, (4, model.config.hidden)), jnp.float32)

    @jax.jit
    @jax.value_and_grad
    def run(soft):
        x = jnp.concatenate([soft, embedded])[None]
        logits, _ = bj.forward(model.params, x, jnp.array([x.shape[1]]), model.config)
        scores = jax.nn.log_softmax(logits[0, len(soft) - 1 : -1])
        return -jnp.take_along_axis(scores, jnp.asarray(IDS)[:, None], axis=-1).mean()

    def loss(soft):
        return run(soft)[0]

    _, gradient = run(soft)
    assert gradient.shape == soft.shape and jnp.isfinite(gradient).all()
    directions = [gradient, *np.random.default_rng(4).normal(size=(2, *soft.shape)).astype(np.float32)]
    for direction in directions:
        direction = direction / jnp.linalg.norm(direction)
        step = 0.02
        difference = (loss(soft + step * direction) - loss(soft - step * direction)) / (2 * step)
        np.testing.assert_allclose(jnp.vdot(gradient, direction), difference, rtol=0.02, atol=2e-4)
    assert loss(soft - 0.5 * gradient / jnp.linalg.norm(gradient)) < loss(soft)


def test_padding_does_not_poison_gradients():
    model = tiny("tiny-llama:q8_0")
    x = bj.embed(model.params, jnp.asarray(IDS[:16]).reshape(2, 8))

    def loss(x):
        logits, _ = bj.forward(model.params, x, jnp.array([8, 5]), model.config)
        return jax.nn.logsumexp(logits, -1)[jnp.arange(2), jnp.array([7, 4])].sum()

    gradient = jax.jit(jax.grad(loss))(x)
    assert jnp.isfinite(gradient).all() and not gradient[1, 5:].any() and jnp.abs(gradient[1, :5]).min() > 0


@pytest.mark.parametrize(
    ("source", "every_choice"),
    [
        ("tiny-qwen3:q1_0", True), ("tiny-gemma3:q8_0", False), ("tiny-qwen35:q8_0", False),
        pytest.param("tiny-gemma3:q8_0", True, marks=pytest.mark.slow),
        pytest.param("tiny-qwen35:q8_0", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_some_layers_are_read_as_among_all(source, every_choice):
    """Taps with layers, and a forward that stops after some: what all layers' taps read there."""
    model = tiny(source)
    count = model.config.num_layers
    logits, every = forward(model, taps=bj.Taps({"middle", "output"}))
    tokens, lengths = jnp.asarray(IDS)[None], jnp.array([len(IDS)])
    choices = [[0], sorted({1, count // 2, count - 1}), [count - 1], range(count)]
    for layers in choices if every_choice else choices[:2]:
        picked = bj.Taps({"middle", "output"}, layers=layers)
        same, some = forward(model, taps=picked)
        np.testing.assert_allclose(same, logits, atol=1e-4)
        for site in ("middle", "output"):
            np.testing.assert_allclose(some[site], every[site][np.array(layers)], atol=1e-4)
        stop = max(layers) + 1
        options = {"taps": picked, "stop_at_layer": stop}
        stream, some = bj.jitted.forward(model.params, tokens, lengths, model.config, logits=False, **options)
        np.testing.assert_allclose(some["output"][:, 0], every["output"][np.array(layers)], atol=1e-4)
        np.testing.assert_allclose(stream[0], every["output"][stop - 1], atol=1e-4)
        lens, _ = bj.jitted.forward(model.params, tokens, lengths, model.config, **options)
        np.testing.assert_allclose(lens, bj.unembed(model.params, stream, model.config), atol=1e-4)


def test_layers_that_are_not_named_are_not_edited():
    model = tiny()

    def double(name, layer, x):
        return 2 * x if name == "mlp" else x

    def double_one(name, layer, x):
        return jnp.where(layer == LAYER, 2 * x, x) if name == "mlp" else x

    want, _ = forward(model, taps=bj.Taps(edit=double_one))
    got, _ = forward(model, taps=bj.Taps(edit=double, layers=LAYER))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_forward_that_stops_early_has_neither_later_layers_nor_the_output_matrix():
    model = tiny()
    c, tokens, lengths = model.config, jnp.asarray(IDS)[None], jnp.array([len(IDS)])

    def program(**options):
        run = functools.partial(bj.forward, config=c, **options)
        return str(jax.make_jaxpr(run)(model.params, tokens, lengths))

    whole, one = program(), program(stop_at_layer=1, logits=False)
    assert f"length={c.num_layers}" in whole and f"length={c.num_layers}" not in one
    logits = f"f32[1,{len(IDS)},{c.vocab_size}]"
    # The loop's body is the same in both, and has arrays of this width too.
    assert whole.count(logits) > program(logits=False).count(logits)
    assert one.count(logits) == program(logits=False).count(logits)


def test_wrong_layers_are_refused():
    model = tiny()
    for layers, error in ((("a",), TypeError), ((), ValueError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="layers"):
            bj.Taps("output", layers=layers)
    count = model.config.num_layers
    with pytest.raises(ValueError, match=f"layers has {count}; the layers that run are 0 to {count - 1}"):
        forward(model, taps=bj.Taps("output", layers=count))
    tokens, lengths = jnp.asarray(IDS)[None], jnp.array([len(IDS)])
    for stop in (0, count + 1):
        with pytest.raises(ValueError, match=f"stop_at_layer is {stop}"):
            bj.forward(model.params, tokens, lengths, model.config, stop_at_layer=stop)
    with pytest.raises(ValueError, match="expected"):
        bj.unembed(model.params, jnp.zeros((2, 3)), model.config)
