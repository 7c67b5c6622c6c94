"""Adapters beside packed weights: products and gradients against numpy in float64, whole models against
weights with the change added in numpy, files against each other and llama.cpp."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import bonsai_jax as bj
from bonsai_jax import card
from bonsai_jax.adapters.targets import TILED, TURNED, targets
from bonsai_jax.network import architectures, decoder
from bonsai_jax.network import cache as kv
from bonsai_jax.network import params as network_params
from bonsai_jax.network.adapter import adaptable
from bonsai_jax.network.schedules import StepPlan
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import CheckpointError, Tensor, open_checkpoint
from pallas_kernels import Adapted, LayerStack, LowRank, dequantize, device, gated, matmul, quantize
from pallas_kernels.qtensor import tile
from tests.bonsai_jax import any_architecture, test_folding, test_qwen35, test_relatives
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.llama_cpp import LlamaCpp
from tests.bonsai_jax.serving import serving
from tests.bonsai_jax.test_oracle import as_file
from tests.bonsai_jax.tiny_files import logits

IDS = np.random.default_rng(0).integers(0, 256, 12).tolist()
REFERENCE = bj.RunConfig(impl="reference", weights="packed", page_size=16, context=64)


@functools.cache
def tiny(source: str = "tiny-llama:q1_0") -> bj.Model:
    return bj.load(f"synth:{source}", REFERENCE)


def drawn(adapter: bj.Adapter, size: float = 0.05, seed: int = 0) -> bj.Adapter:
    """Other numbers in its A and B."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(size * rng.standard_normal(x.shape, np.float32), x.dtype), adapter
    )


def fresh(model: bj.Model, rank: int = 4, **how) -> bj.Adapter:
    return bj.lora(model.config, rank, key=jax.random.key(0), **how)


def forward(params, config, ids=IDS):
    """Logits [T, V]; tokens are padded, so that there are few programs."""
    tokens, lengths = jnp.array([[*ids, *[0] * (18 - len(ids))]]), jnp.array([len(ids)])
    return np.asarray(bj.jitted.forward(params, tokens, lengths, config)[0][0, : len(ids)])


def loaded(checkpoint):
    """Params and config, of files without a tokenizer too."""
    description = architectures.describe(checkpoint)
    plan = load_plans.planned(description, load_plans.resolve(description, bj.RunConfig(impl="reference")))
    return network_params.load(plan), plan.config


# ---- Products ----


def low_rank(rng, rows: int, columns: int, start: int = 0) -> LowRank:
    a, b = rng.standard_normal((2, 3, columns)), rng.standard_normal((2, rows, 3))
    return LowRank(jnp.asarray(0.1 * a, jnp.float32), jnp.asarray(0.1 * b, jnp.float32), 0.5, start)


@pytest.mark.parametrize("op", ["matmul", "gated"])
def test_a_product_and_its_gradient_are_those_in_float64(op):
    """By central differences of numpy's in float64. The change is of some rows in the middle."""
    rng = np.random.default_rng(1)
    matrices = 1 if op == "matmul" else 2
    stacks = [
        LayerStack(
            (quantize(jnp.asarray(rng.standard_normal((2, 32, 128)), jnp.float32), "q8_0"),), ((0, 0), (0, 1))
        )
        for _ in range(matrices)
    ]
    changes = [low_rank(rng, 8, 128, 16) for _ in range(matrices)]
    x, gamma, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 128), (128,), (3, 32)))

    @jax.jit
    @jax.value_and_grad
    def ours(changes):
        weights = [Adapted(stack, (change,)) for stack, change in zip(stacks, changes, strict=True)]
        function = matmul if op == "matmul" else gated
        return (function(x, *weights, 1, gamma=jnp.asarray(gamma), eps=1e-5) * c).sum()

    dense = [np.asarray(dequantize(stack.parts[0]), np.float64)[1] for stack in stacks]

    def expected(factors):
        n = x.astype(np.float64)
        n = gamma * n / np.sqrt((n**2).mean(-1, keepdims=True) + 1e-5)
        y = []
        for w, (a, b) in zip(dense, factors, strict=True):
            w = w.copy()
            w[16:24] += 0.5 * b[1] @ a[1]
            y.append(n @ w.T)
        out = y[0] if op == "matmul" else y[0] / (1 + np.exp(-y[0])) * y[1]
        return (out * c).sum()

    factors = [(np.asarray(change.a, np.float64), np.asarray(change.b, np.float64)) for change in changes]
    value, gradient = ours(changes)
    assert value == pytest.approx(expected(factors), rel=1e-5)
    for number, change in enumerate(gradient):
        for half, got in enumerate((change.a, change.b)):
            direction, ends = rng.standard_normal(got.shape), []
            for step in (1e-6, -1e-6):
                moved = [list(pair) for pair in factors]
                moved[number][half] = moved[number][half] + step * direction
                ends.append(expected(moved))
            assert float((got * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4)
            assert not np.asarray(got)[0].any()  # of the other layer


@pytest.mark.parametrize("count", [3, 5])
def test_rows_have_their_own_changes(count):
    """Of as many adapters as rows and fewer, and of more."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, count, 4, 32)), rng.standard_normal((2, count, 16, 4))
    x, chosen = rng.standard_normal((3, 2, 32)), np.array([2, 0, 2])
    change = LowRank(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), 0.5)
    got = change(jnp.asarray(x, jnp.float32), 1, jnp.asarray(chosen))
    want = [0.5 * x[row] @ a[1, one].T @ b[1, one].T for row, one in enumerate(chosen)]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    first = change(jnp.asarray(x[0], jnp.float32), 1)
    np.testing.assert_allclose(first, 0.5 * x[0] @ a[1, 0].T @ b[1, 0].T, rtol=1e-4, atol=1e-4)


# ---- Whole models ----


def test_a_fresh_adapter_changes_nothing_and_one_that_is_taken_away_leaves_the_model():
    model = tiny()
    with_one = model.with_adapter(fresh(model))
    beside = forward(with_one.params, model.config)
    np.testing.assert_allclose(beside, forward(model.params, model.config), atol=1e-5)
    assert jax.tree.structure(with_one.with_adapter().params) == jax.tree.structure(model.params)


def test_where_names_matrices_and_kinds():
    model = tiny()
    every = {(kind, name) for kind, _, name, _ in fresh(model).each()}
    assert every == {("attention", n) for n in "qkvo"} | {("mlp", n) for n in ("gate", "up", "down")}
    some = {name for _, _, name, _ in fresh(model, where=["q", "mlp"]).each()}
    assert some == {"q", "gate", "up", "down"}
    with pytest.raises(
        ValueError, match="where: q_proj: this model has q, k, v, o, gate, up, down, attention"
    ):
        fresh(model, where=["q_proj"])
    with pytest.raises(TypeError, match="give a list of names"):
        fresh(model, where="q")
    other = fresh(tiny("tiny-qwen3:q1_0"))
    with pytest.raises(ValueError, match=r"adapter: attention.q of group 0 is of 3 layers, 512 x 256"):
        tiny().with_adapter(other)
    with pytest.raises(
        ValueError, match=r"3 layers, 256 x 512 \(N x K\), is beside a weight of 3 layers, 256 x 256"
    ):
        forward(tiny().params.replace(adapter=other), tiny().config)


def loss(params, config):
    """The mean surprise at the tokens of IDS."""
    scores = bj.forward(params, jnp.array([IDS]), jnp.array([len(IDS)]), config)[0][0, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.array(IDS[1:])).mean()


@functools.cache
def slope():
    """Loss and gradient of an adapter beside a packed model."""
    model = tiny("tiny-llama:q8_0")
    return jax.jit(jax.value_and_grad(lambda a: loss(model.params.replace(adapter=a), model.config)))


def test_the_gradient_of_a_packed_model_is_that_of_dense_weights():
    """dA = s B^T dW and dB = s dW A^T, with dW of the same model in float32; and central differences."""
    model, scale = tiny("tiny-llama:q8_0"), 1.5
    dense = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(impl="reference", weights="decoded"))
    adapter = drawn(fresh(model, alpha=4 * scale), 0.02)
    value, gradient = slope()(adapter)
    size = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    step = 0.02 / size
    ends = [slope()(jax.tree.map(lambda x, g, s=s: x + s * g, adapter, gradient))[0] for s in (step, -step)]
    np.testing.assert_allclose(size, (ends[0] - ends[1]) / 0.04, rtol=0.02)

    merged = bj.merge(dense.params, adapter, "f32")
    down = lambda part: merged.replace(  # noqa: E731
        layers=merged.layers
        | {"mlp": (merged.layers["mlp"][0].replace(down=LayerStack((part,), ((0, 0), (0, 1), (0, 2)))),)}
    )
    (part,) = merged.layers["mlp"][0].down.parts
    expected, slopes = jax.jit(jax.value_and_grad(lambda part: loss(down(part), dense.config)))(part)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    dw = np.asarray(slopes.fields["w"]).reshape(3, *part.shape)
    own, got = (tree.layers["mlp"][0]["down"] for tree in (adapter, gradient))
    for ours, this in (
        (got.a, scale * np.einsum("lnr,lnk->lrk", own.b, dw)),
        (got.b, scale * np.einsum("lnk,lrk->lnr", dw, own.a)),
    ):
        np.testing.assert_allclose(ours, this, atol=1e-4 * np.abs(this).max())


def test_training_makes_the_loss_go_down():
    adapter, optimizer = fresh(tiny("tiny-llama:q8_0"), alpha=6), optax.adam(3e-3)
    moments, losses = optimizer.init(adapter), []

    @jax.jit
    def updated(gradient, moments, adapter):
        changes, moments = optimizer.update(gradient, moments, adapter)
        return optax.apply_updates(adapter, changes), moments

    for _ in range(10):
        value, gradient = slope()(adapter)
        adapter, moments = updated(gradient, moments, adapter)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize(
    "source", ["tiny-llama:q4_k_m", pytest.param("tiny-gemma3:q8_0", marks=pytest.mark.slow)]
)
def test_merged_is_beside(source):
    """In float32 but for the order of sums; in a matrix's own format within its step. Formats differ from
    layer to layer, and between q, k and v; gemma has two groups of layers and norms after both halves."""
    model = tiny(source)
    adapter = drawn(fresh(model, 3))
    beside = forward(model.with_adapter(adapter).params, model.config)
    merged = forward(bj.merge(model.params, adapter, "f32"), model.config)
    np.testing.assert_allclose(merged, beside, atol=2e-5 * np.abs(beside).max())
    assert np.abs(beside - forward(model.params, model.config)).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["arcee", "deepseek2", "gemma4", "granitehybrid", "lfm2", "nemotron_h", "phi3", "qwen35", "qwen3next"],
)
def test_every_matrix_of_every_kind_of_layer_is_changed(name):
    """Merged is beside, and each change alone makes a difference. Steps are prefill."""
    params, config = loaded(any_architecture.tiny(name))
    adapter = drawn(bj.lora(config, 2, key=jax.random.key(0)), 0.1)
    assert {kind for kind, *_ in adapter.each()} == {k for k in config.kinds if adaptable(k)}
    beside = forward(params.replace(adapter=adapter), config)
    merged = forward(bj.merge(params, adapter, "f32"), config)
    np.testing.assert_allclose(merged, beside, atol=1e-4 * np.abs(beside).max())
    for kind, group, matrix, change in adapter.each():
        without = jax.tree.map(lambda x: x, adapter)
        without.layers[kind][group][matrix] = change.replace(b=0 * change.b)
        assert np.abs(forward(params.replace(adapter=without), config) - beside).max() > 1e-4, matrix
    description = architectures.describe(any_architecture.tiny(name))
    run = load_plans.resolve(description, bj.RunConfig(impl="reference", page_size=16))
    cache = kv.empty(config, run, 1, 32)
    for token, want in zip(IDS, beside, strict=True):
        got, cache = bj.jitted.extend(
            params.replace(adapter=adapter), cache, jnp.array([[token]]), jnp.array([1]), config
        )
        np.testing.assert_allclose(got[0, 0], want, atol=1e-3 * np.abs(beside).max())


def test_merged_in_its_own_format_is_rounded_to_it():
    model = tiny("tiny-llama:q8_0")
    adapter = drawn(fresh(model, where=["v", "o"]))
    merged = bj.merge(model.params, adapter)
    assert merged.step == model.params.step
    (before,), (after,) = (p.layers["attention"] for p in (model.params, merged))
    change = next(c for _, _, name, c in adapter.each() if name == "v")
    for layer in range(3):
        old, new = (np.asarray(dequantize(w.qkv[0].parts[0][layer])) for w in (before, after))
        exact = old.copy()
        exact[change.start :] += change.scale * np.asarray(change.b[layer]) @ np.asarray(change.a[layer])
        step = np.abs(exact).reshape(len(exact), -1, 32).max(-1).repeat(32, -1) / 127
        assert (np.abs(new - exact) <= 0.51 * step + 1e-3 * np.abs(exact)).all()  # a scale of 11 bits
        np.testing.assert_array_equal(new[: change.start], old[: change.start])
    # The layout of GPU kernels holds the same weights.
    (part,) = before.o.parts
    tiled = before.replace(o=LayerStack((jax.jit(tile)(part),), before.o.where))
    layers = model.params.layers | {"attention": (tiled,)}
    (as_tiles,) = bj.merge(model.params.replace(layers=layers), adapter).layers["attention"]
    assert as_tiles.o.parts[0].tiled
    np.testing.assert_array_equal(jax.jit(dequantize)(as_tiles.o.parts[0]), dequantize(after.o.parts[0]))
    with pytest.raises(NotImplementedError, match="format iq2_xxs has no encoder"):
        bj.merge(model.params, adapter, "iq2_xxs")


def test_beside_folded_weights_it_takes_the_input_as_it_is():
    """The same adapter beside the model and beside its Hadamard-folded form, and merged into that."""
    plain, folded = (
        bj.from_checkpoint(make("tiny-qwen3"), REFERENCE)
        for make in (test_folding.plain, test_folding.folded)
    )
    adapter = drawn(fresh(plain))
    want = forward(plain.with_adapter(adapter).params, plain.config)
    for params in (folded.with_adapter(adapter).params, bj.merge(folded.params, adapter)):
        np.testing.assert_allclose(forward(params, folded.config), want, atol=2e-5 * np.abs(want).max())


def test_everything_takes_it():
    """generate, the engine, taps and states; steps that would be fused run product by product."""
    model = tiny()
    adapted = model.with_adapter(drawn(fresh(model), 0.2))
    greedy, how = bj.SamplingParams(temperature=0.0), {"max_new_tokens": 6, "ignore_eos": True}
    ids = list(IDS)
    for _ in range(6):
        ids.append(int(forward(adapted.params, adapted.config, ids)[-1].argmax()))
    (output,) = bj.generate(adapted, IDS, sampling=greedy, **how)
    assert output.tokens == ids[len(IDS) :]
    fused = adapted.params.replace(step=StepPlan(((8, "layer_products"),)))
    state = bj.new_state(adapted, 1, 64, greedy, 6, ignore_eos=True)
    drawn_tokens = bj.jitted.generate_tokens(
        fused, state, jnp.array([IDS]), jnp.array([len(IDS)]), adapted.config, size=6
    )
    assert np.asarray(drawn_tokens.tokens)[0].tolist() == ids[len(IDS) :]
    tokens, lengths = jnp.array([IDS]), jnp.array([len(IDS)])
    scores, read = bj.jitted.forward(adapted.params, tokens, lengths, adapted.config, taps=bj.Taps("output"))
    np.testing.assert_allclose(
        bj.unembed(adapted.params, read["output"][-1], adapted.config), scores, atol=1e-4
    )


@pytest.mark.parametrize(
    ("rows", "rank", "schedule"),
    [
        (1, 4, "one_launch"),
        (1, 6, "launches"),
        (2, 4, "launches"),
        pytest.param(64, 4, "launches", marks=pytest.mark.slow),
    ],
)
def test_on_a_gpu_a_step_of_one_row_is_one_launch(rows, rank, schedule, monkeypatch):
    """With the adapter beside its products. Other steps run product by product, by the kernels of the base:
    five for each layer, and the head's."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    checkpoint = open_checkpoint("synth:tiny-qwen3:q1_0")
    plan = load_plans.plan(architectures.describe(checkpoint), bj.RunConfig(context=256))
    params = jax.eval_shape(lambda: network_params.load(plan))
    adapter = jax.eval_shape(lambda: bj.lora(plan.config, rank, key=jax.random.key(0)))
    cache = jax.eval_shape(lambda: kv.empty(plan.config, plan.run, rows, 256))

    def kernels(params):
        ones = jnp.zeros((rows, 1), jnp.int32)
        step = lambda params, cache: decoder.decoder(params, ones, ones, cache, plan.config, 256)[0]  # noqa: E731
        return re.findall(r"name=(\w*decode\w*|\w*prefill\w*)", str(jax.make_jaxpr(step)(params, cache)))

    without, beside = params, params.replace(adapter=adapter)
    assert params.step.schedule(rows) == ("one_launch" if rows <= 24 else "layer_gemms")
    assert ("decode_layers" in kernels(without)) == (rows <= 24)
    assert ("decode_layers" in kernels(beside)) == (schedule == "one_launch")
    if schedule == "launches":
        assert sum(name.startswith("bit_") for name in kernels(beside)) >= 5 * 3
    names = [card.step_names(one, plan.config, rows) for one in (without, beside)]
    assert (names[0] == names[1]) == (schedule == "one_launch")


# ---- Per request ----


@functools.cache
def served_model() -> bj.Model:
    return bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=128, batch_size=4))


@functools.cache
def three() -> dict[str, bj.Adapter]:
    """Of two ranks and sets of matrices."""
    model = served_model()
    how = {"a": (2, None), "b": (4, ["q", "mlp"]), "c": (4, ["q", "mlp"])}
    made = {name: fresh(model, rank, alpha=2 * rank, where=where) for name, (rank, where) in how.items()}
    return {name: drawn(adapter, 0.2, seed) for seed, (name, adapter) in enumerate(made.items())}


def alone(name: str | None, prompt: list[int], count: int) -> list[int]:
    """What a model with this adapter alone says."""
    model = served_model()
    model = model if name is None else model.with_adapter(three()[name])
    greedy = bj.SamplingParams(temperature=0.0)
    return bj.generate(model, [prompt], sampling=greedy, max_new_tokens=count, ignore_eos=True)[0].tokens


def test_a_batch_with_four_adapters_is_four_batches():
    """One of them none. Beginnings of prompts are shared by requests with the same adapter alone."""
    prompt, how = list(range(1, 71)), {"max_new_tokens": 6, "ignore_eos": True}
    greedy, names = bj.SamplingParams(temperature=0.0), [None, *three()]
    want = {name: alone(name, prompt, 6) for name in names}
    assert len({tuple(tokens) for tokens in want.values()}) == 4, want
    model = served_model()
    with bj.Engine(model, max_batch_size=4, context=128, pages=16, adapters=three()) as engine:
        for cached in (0, 64):
            handles = {name: engine.submit(prompt, greedy, adapter=name, **how) for name in names}
            outputs = {name: handle.result(timeout_s=60) for name, handle in handles.items()}
            assert {name: output.tokens for name, output in outputs.items()} == want
            assert all(output.cached_tokens >= cached for output in outputs.values())
            assert cached or not any(output.cached_tokens for output in outputs.values())
        with pytest.raises(ValueError, match="no adapter is called 'd'; the engine has a, b, c"):
            engine.submit(prompt, adapter="d", max_new_tokens=2)
        # Functions of params have the first, which is none.
        got, own = (forward(m.params, m.config) for m in (engine.model, model))
        np.testing.assert_allclose(got, own, atol=1e-2 * np.abs(own).max())
        # Other weights of the same structure: those of the second adapter for all.
        params = engine.model.params
        second = jax.tree.map(lambda x: jnp.stack([x[:, 2]] * 4, axis=1), params.adapter)
        engine.update_params(params.replace(adapter=second))
        assert engine.submit(prompt, greedy, **how).result(timeout_s=60).tokens == want["b"]
    without = pytest.raises(ValueError, match=r"no adapter is called 'a'; give Engine\(adapters=")
    with bj.Engine(model, max_batch_size=1, context=128) as engine, without:
        engine.submit(prompt, adapter="a", max_new_tokens=2)
    with pytest.raises(ValueError, match=r"adapter: attention.q of group 0 is of 3 layers, 512 x 256"):
        bj.Engine(model, adapters={"other": fresh(tiny("tiny-qwen3:q1_0"))})


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_constrained_and_speculating_rows_have_their_adapters(speculate):
    """The likeliest text of an adapter among those that a constraint allows. With steps in two programs, and
    with guesses."""
    prompt, greedy = list(range(1, 71)), bj.SamplingParams(temperature=0.0)
    model, choices = served_model(), bj.choice([chr(n) * 3 for n in range(97, 123)])
    how = {"max_new_tokens": 4, "ignore_eos": False}
    want = {}
    for name, adapter in three().items():
        (output,) = bj.generate(
            model.with_adapter(adapter), [prompt], sampling=greedy, constraint=choices, **how
        )
        want[name] = output.text
    with bj.Engine(model, max_batch_size=4, context=128, adapters=three(), speculate=speculate) as engine:
        handles = {n: engine.submit(prompt, greedy, adapter=n, constraint=choices, **how) for n in three()}
        plain = engine.submit(prompt, greedy, adapter="a", max_new_tokens=6, ignore_eos=True)
        assert {name: handle.result(timeout_s=120).text for name, handle in handles.items()} == want
        assert plain.result(timeout_s=120).tokens == alone("a", prompt, 6)


def test_a_server_takes_an_adapters_name_as_the_model():
    prompt = list(range(1, 71))
    engine = {"context": 128, "adapters": three()}
    with serving(served_model(), engine=engine) as served, served.http() as client:
        ids = [one["id"] for one in client.get("/v1/models").json()["data"]]
        assert ids == ["tiny", "a", "b", "c"]
        assert client.get("/v1/models/b").json()["parent"] == "tiny"
        for name in ("a", "b", "whatever"):
            body = {"model": name, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            answer = served.post("/v1/completions", **body).json()
            own = name if name in three() else None
            text = served.model.tokenizer.decode(alone(own, prompt, 6))
            assert answer["choices"][0]["text"] == text and answer["model"] == (own or "tiny")
        echoed = served.post("/v1/completions", model="a", prompt="Hi", echo=True, logprobs=1, max_tokens=1)
        assert echoed.status_code == 400 and "echo: with logprobs and the adapter 'a'" in echoed.text


@pytest.mark.parametrize("given", ["a", "=b", "a="])
def test_names_of_adapters_are_checked_before_a_model_is_loaded(given):
    done = run("serve", "-m", "synth:tiny-llama:q8_0", "--port", 0, "--adapter", given)
    assert done.exit_code == 2 and "give NAME=FILE or" in done.stderr


# ---- Files ----


def write_peft(folder, pairs, **config):
    """A folder of PEFT, by hand. pairs: {module: (A, B)}"""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(a, np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(b, np.float32)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def values(tensor) -> np.ndarray:
    return np.asarray(blocks(tensor)).view(np.float32).reshape(tensor.shape)


def with_changes(checkpoint, changes):
    """The folder with these changes added to its tensors, in numpy."""
    tensors = dict(checkpoint.tensors)
    for name, change in changes.items():
        w = np.ascontiguousarray(values(tensors[name]) + change, np.float32)
        tensors[name] = Tensor(name, "f32", w.shape, w.view(np.uint8))
    return type(checkpoint)(checkpoint.source, checkpoint.naming, checkpoint.metadata, tensors)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("minicpm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")),
        ("internlm2", ("attention.wqkv", "feed_forward.w1")),  # fused rows, which are turned too
        pytest.param(  # one order in both kinds of files
            "chatglm", ("self_attention.query_key_value",), marks=pytest.mark.slow
        ),
        # Tiled v heads, which are rows of some and columns of others.
        pytest.param(
            "qwen35",
            ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "linear_attn.out_proj", "q_proj"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_folders_of_peft_and_gguf_files_give_one_set_of_logits(name, modules, tmp_path):
    """Of a model from a folder and from a GGUF file, whose queries and keys have rows in another order. Ranks
    and alphas differ, one layer has no change, and the oracle adds B A in numpy to the folder's tensors."""
    if name == "qwen35":
        folder, file = test_qwen35.folder(), open_checkpoint(test_qwen35.TINY)
    else:
        folder, file = test_relatives.folder(name), test_relatives.file(name)
    rng, pairs, changes = np.random.default_rng(3), {}, {}
    chosen = [
        t for t in folder.tensors if t.endswith(tuple(f"{m}.weight" for m in modules)) and ".1." not in t
    ]
    assert len(chosen) >= 2 * len(modules) - (name == "qwen35")
    for number, tensor in enumerate(chosen):
        rank, (n, k) = 2 + (number == 0), folder.tensors[tensor].shape
        a, b = 0.2 * rng.standard_normal((rank, k)), 0.2 * rng.standard_normal((n, rank))
        module = tensor.removesuffix(".weight")
        pairs[module] = a, b
        changes[tensor] = (9 if number == 1 else 6) / np.sqrt(rank) * b @ a
    patterns = {"alpha_pattern": {list(pairs)[1].removeprefix("model."): 9}, "rank_pattern": {"whatever": 3}}
    path = write_peft(tmp_path / "peft", pairs, use_rslora=True, **patterns)
    want = logits(with_changes(folder, changes), IDS)
    models = [loaded(folder), loaded(file)]
    for params, config in models:
        got = forward(params.replace(adapter=bj.load_adapter(path, config)), config)
        np.testing.assert_allclose(got, want, atol=1e-4)
    adapters = [bj.load_adapter(path, config) for _, config in models]
    for (_, config), adapter in zip(models, adapters, strict=True):
        for written in (tmp_path / "again.gguf", tmp_path / "again"):
            bj.save_adapter(written, adapter, config)
            for params, other in models:
                got = forward(params.replace(adapter=bj.load_adapter(written, other)), other)
                np.testing.assert_allclose(got, want, atol=1e-4)


def test_which_architectures_have_two_orders_of_rows():
    """Those whose GGUF files have an interleaved rope, but for those whose folders have it too."""
    native = {"chatglm", "cohere2", "command_r", "ernie4_5", "ernie4_5_moe", "glm4"}
    interleaved = set()
    for name in architectures.names():
        config = architectures.config_of(any_architecture.tiny(name))
        ropes = [group.settings.rope for group in config.groups("attention")]
        if any(rope is not None and rope.interleaved for rope in ropes):
            interleaved.add(name)
        for target in targets(config):
            assert not target.spec.optional  # else an adapter could change what the model lacks
        nets = [group.settings for group in config.groups("delta_net")]
        assert (name in TILED) == any(not net.grouped for net in nets)
    assert interleaved - native == TURNED


@pytest.mark.parametrize("source", ["tiny-llama:f32", pytest.param("tiny-qwen3:f32", marks=pytest.mark.slow)])
def test_llama_cpp_gives_the_same_probabilities(source, tmp_path):
    """With the adapter that we write, at a scale. Beside float32, as llama.cpp would round activations."""
    as_file(open_checkpoint(f"synth:{source}"), tmp_path / "model.gguf")
    model = bj.load(tmp_path / "model.gguf", REFERENCE)
    adapter = drawn(fresh(model, alpha=6), 0.1)
    bj.save_adapter(tmp_path / "lora.gguf", adapter, model.config)
    theirs = LlamaCpp(tmp_path / "model.gguf", 256, lora={tmp_path / "lora.gguf": 0.5})
    adapted = bj.load(tmp_path / "model.gguf", REFERENCE, lora=f"{tmp_path / 'lora.gguf'}:0.5")
    ours = jax.nn.log_softmax(forward(adapted.params, adapted.config)[-1])
    plain = jax.nn.log_softmax(forward(model.params, model.config)[-1])
    row = theirs.greedy(IDS, 1, readable=104)
    ids, scores = np.array(row["top_ids"][0]), np.array(row["top_logprobs"][0])
    assert np.abs(np.asarray(ours)[ids] - scores).max() < 1e-3
    assert np.abs(np.asarray(plain)[ids] - scores).max() > 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_numbers_of_16_bits_stay_so(dtype, tmp_path):
    """In both kinds of files; and a scale of 0 is none of 1."""
    config = tiny().config
    adapter = drawn(fresh(tiny(), 2, alpha=6, where=["v", "down"], dtype=jnp.dtype(dtype)))
    for path in (tmp_path / "one.gguf", tmp_path / "one"):
        bj.save_adapter(path, adapter, config)
        again = bj.load_adapter(path, config)
        assert jax.tree.structure(again) == jax.tree.structure(adapter)
        for own, read in zip(jax.tree.leaves(adapter), jax.tree.leaves(again), strict=True):
            assert own.dtype == read.dtype == dtype
            np.testing.assert_array_equal(own, read)
        bj.save_adapter(path, bj.load_adapter(path, config, scale=0), config)
        nothing = bj.load_adapter(path, config)
        assert not any(np.any(c.scale * np.asarray(c.b, np.float32)) for *_, c in nothing.each())


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"use_dora": True}, NotImplementedError, r"DoRA \(use_dora\) is not supported; merge it with PEFT"),
        ({"bias": "all"}, NotImplementedError, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, NotImplementedError, r"whole matrices .*\(modules_to_save\)"),
        ({"peft_type": "IA3"}, NotImplementedError, "peft_type is 'IA3'; supported: LORA"),
        ({"lora_alpha": "much"}, CheckpointError, "lora_alpha is 'much'; a number is expected"),
    ],
)
def test_settings_of_peft_that_are_refused(change, error, says, tmp_path):
    with pytest.raises(error, match=says):
        bj.load_adapter(write_peft(tmp_path / "peft", {}, **change), tiny().config)


def test_files_that_are_refused(tmp_path):
    config, pair = tiny().config, (np.ones((2, 256)), np.ones((512, 2)))
    q = "model.layers.0.self_attn.q_proj"
    cases = [
        (
            {"lm_head": pair},
            NotImplementedError,
            "it changes lm_head.weight, which .* they are of: attention.q",
        ),
        ({f"{q}.other": pair}, NotImplementedError, "q_proj.other.weight, which this llama model does not"),
        ({q: (pair[0], np.ones((100, 2)))}, CheckpointError, r"B \[100, 2\]; this model needs \[rank, 256\]"),
        ({q: (pair[0][0], pair[1])}, CheckpointError, "lora_A and lora_B are expected, both matrices"),
    ]
    for number, (pairs, error, says) in enumerate(cases):
        with pytest.raises(error, match=says):
            bj.load_adapter(write_peft(tmp_path / str(number), pairs), config)
    bj.save_adapter(tmp_path / "qwen.gguf", fresh(tiny("tiny-qwen3:q1_0")), tiny("tiny-qwen3:q1_0").config)
    with pytest.raises(CheckpointError, match="this adapter is of qwen3, but the model is llama"):
        bj.load_adapter(tmp_path / "qwen.gguf", config)
    with pytest.raises(
        CheckpointError, match=r"no such file; an adapter is a folder with adapter_config.json"
    ):
        bj.load_adapter(tmp_path / "nothing", config)
    with pytest.raises(CheckpointError, match="the adapter's settings cannot be read"):
        bj.load_adapter(tmp_path, config)
    (tmp_path / "0" / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="the adapter's weights cannot be read"):
        bj.load_adapter(tmp_path / "0", config)
    with pytest.raises(CheckpointError, match=r"qwen.gguf: this is an adapter"):
        bj.load(tmp_path / "qwen.gguf")
    as_file(open_checkpoint("synth:tiny-llama:q8_0"), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"not 'adapter': this is a model; open it with bj.load"):
        bj.load_adapter(tmp_path / "model.gguf", config)


def test_several_files_add_up_and_have_scales(tmp_path):
    model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=256, batch_size=1))
    one, two = drawn(fresh(model, 2, where=["q", "down"])), drawn(fresh(model, 3, where=["q"]), seed=1)
    for name, adapter in (("one.gguf", one), ("two", two)):
        bj.save_adapter(tmp_path / name, adapter, model.config)
    files = [f"{tmp_path}/one.gguf:0.25", f"{tmp_path}/two"]
    both = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=256, batch_size=1), lora=files)
    changes = {name: change for _, _, name, change in both.params.adapter.each()}
    q = {name: c for adapter in (one, two) for _, _, name, c in adapter.each() if name == "q"}
    assert changes["q"].rank == 5 and changes["down"].scale == 0.25 and q["q"].rank == 3
    want = 0.25 * np.einsum("lnr,lrk->lnk", *(next(one.each())[3].b, next(one.each())[3].a))
    want += np.einsum("lnr,lrk->lnk", next(two.each())[3].b, next(two.each())[3].a)
    got = np.einsum("lnr,lrk->lnk", changes["q"].b, changes["q"].a)
    np.testing.assert_allclose(got, want, atol=1e-6)
    (expected,) = bj.generate(both, "Hi", sampling=bj.SamplingParams(temperature=0.0), max_new_tokens=8)
    options = [part for file in files for part in ("--lora", file)]
    done = run("generate", "-m", "synth:tiny-llama:q8_0", "-c", 256, "--temp", 0, "-n", 8, *options, "Hi")
    assert done.exit_code == 0 and done.stdout == expected.text + "\n"
    wrong = run("generate", "-m", "synth:tiny-llama:q8_0", "--lora", tmp_path / "none", "Hi")
    assert wrong.exit_code == 1 and "none: no such file" in wrong.stderr
