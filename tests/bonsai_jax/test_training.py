"""Training of packed models: what is trained, what runs and what a file has are one set of weights; losses in
numpy. Whether training helps: test_training_helps.py."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bonsai_jax as bj
from bonsai_jax import training
from checkpoints import open_checkpoint
from pallas_kernels import dequantize, straight_through
from pallas_kernels.qtensor import QTensor, leaves
from tests.bonsai_jax.test_gemma4 import tiny as gemma4
from tests.bonsai_jax.test_oracle import as_file
from tests.bonsai_jax.tiny_files import tiny_gguf

RUN = bj.RunConfig(context=128, weights="packed", activation_bits=16)
MIXED = (("token_embd|attn_v|^output", "q8_0"), ("blk.1.ffn_down", "q4_0"), ("attn_output", "tq2_0"))
TOKENS, LENGTHS = np.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]]), np.array([6, 4])
SHAPE = {
    "block_count": 2, "embedding_length": 128, "feed_forward_length": 256, "context_length": 128,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return as_file("synth:tiny-llama:f32", tmp_path_factory.mktemp("training") / "tiny.gguf")


def logits(params, config):
    return np.asarray(bj.jitted.forward(params, TOKENS, LENGTHS, config)[0])


def values(params):
    """The weights of every matrix, dequantized."""
    return [np.asarray(dequantize(w)) for w in leaves(params) if isinstance(w, QTensor)]


@pytest.mark.parametrize(
    ("format", "how"),
    [
        ("q1_0", {"tensor_formats": MIXED}),
        pytest.param("q1_0", {"pure": True}, marks=pytest.mark.slow),
        pytest.param("q4_k_m", {}, marks=pytest.mark.slow),
    ],
    ids=["mixed", "pure", "q4_k_m"],
)
def test_what_is_trained_is_what_runs_and_what_a_file_has(original, tmp_path, format, how):
    plan = training.plan(original, format, RUN, **how)
    weights, path = plan.weights(), tmp_path / "packed.gguf"
    params = jax.jit(plan.packed)(weights)
    plan.save(path, weights)
    loaded = bj.load(path, RUN)
    assert jax.tree.structure(params) == jax.tree.structure(loaded.params)
    one_rule = format == "q1_0"  # the search of a K-quant adds in another order in another program
    if one_rule:
        for own, its in zip(jax.tree.leaves(params), jax.tree.leaves(loaded.params), strict=True):
            np.testing.assert_array_equal(own, its)
    rounded = jax.jit(plan.rounded)(weights)
    assert {w.format for w in leaves(rounded) if isinstance(w, QTensor)} == {"f32"}
    for float_matrix, matrix in zip(values(rounded), values(params), strict=True):
        assert not one_rule or float_matrix.tobytes() == matrix.tobytes()
    want = logits(loaded.params, loaded.config)
    if one_rule:
        np.testing.assert_array_equal(logits(params, plan.config), want)
    else:
        np.testing.assert_allclose(logits(rounded, plan.config), want, atol=0.1)


def test_blocks_are_those_of_quantize_file(original, tmp_path):
    """Of the format's own rule, which Q1_0 and formats for any model have."""
    plan = training.plan(original, "q1_0", RUN, tensor_formats=MIXED[:2])
    plan.save(tmp_path / "a.gguf", plan.weights())
    bj.quantize_file(original, tmp_path / "b.gguf", "q1_0", tensor_formats=MIXED[:2])
    a, b = (open_checkpoint(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert list(a.tensors) == list(b.tensors) and repr(a.metadata) == repr(b.metadata)
    for name, tensor in a.tensors.items():
        assert tensor.format == b.tensors[name].format
        np.testing.assert_array_equal(tensor.data, b.tensors[name].data)
    with pytest.raises(FileExistsError, match="there already"):
        plan.save(tmp_path / "a.gguf", plan.weights())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["q1_0", "tq2_0"])
def test_llama_cpp_runs_the_file(tmp_path, format):
    """Its log-probabilities are ours, but for activations that it rounds to 8 bits."""
    from tests.bonsai_jax.llama_cpp import LlamaCpp

    plan = training.plan(tiny_gguf("llama", SHAPE | {"embedding_length": 256}), format, RUN, pure=True)
    weights = plan.weights()
    plan.save(tmp_path / "new.gguf", weights)
    row = LlamaCpp(tmp_path / "new.gguf", 128).greedy([5, 6, 7, 8], 6, readable=300)
    text = np.array([[5, 6, 7, 8, *row["tokens"]]])
    out, _ = bj.jitted.forward(plan.rounded(weights), text, np.array([text.size]), plan.config)
    scores = np.asarray(jax.nn.log_softmax(out[0, 3:-1]))
    own, its = scores[np.arange(6), row["tokens"]], [top[0] for top in row["top_logprobs"]]
    np.testing.assert_allclose(own, its, atol=0.05)
    assert (scores.max(1) - own < 0.1).all()


def test_gradients_pass_through_to_the_weights():
    """Those of the float model at the rounded weights, which are the weights of an unrounded plan."""
    plans = [training.plan(tiny_gguf("llama", SHAPE), format, RUN, pure=True) for format in ("q1_0", "f32")]
    weights = plans[0].weights(scales=True)

    def value(weights, plan):
        out, _ = bj.forward(plan.rounded(weights), TOKENS, LENGTHS, plan.config)
        return jax.nn.log_softmax(out)[0, -1, 7]

    slope = jax.jit(jax.grad(value), static_argnums=1)
    got = slope(weights, plans[0])
    floats = {name: w for name, w in weights.items() if not name.endswith(".scale")}
    round_all = lambda weights: {  # noqa: E731
        name: straight_through(w, "q1_0", weights[name + ".scale"]) if w.ndim > 1 else w
        for name, w in floats.items()
    }
    y = jax.jit(round_all)(weights)
    want = slope(y, plans[1])
    for name in y:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-6, err_msg=name)
    q = np.sign(np.asarray(y["output.weight"]))
    of_scale = (q * np.asarray(want["output.weight"])).reshape(512, 1, 128).sum(-1)
    np.testing.assert_allclose(got["output.weight.scale"], of_scale, rtol=1e-3, atol=1e-5)
    assert set(got) == set(weights) and "blk.1.attn_q.weight.scale" in got and "output_norm.weight" in got


def test_scales_are_packed(tmp_path):
    plan = training.plan(tiny_gguf("llama", SHAPE), "q1_0", RUN, pure=True)
    weights = plan.weights(scales=True)
    weights = {k: 1.5 * w if k.endswith(".scale") else w for k, w in weights.items()}
    plan.save(tmp_path / "scaled.gguf", weights)
    loaded = bj.load(tmp_path / "scaled.gguf", RUN)
    for rounded, matrix in zip(values(jax.jit(plan.rounded)(weights)), values(loaded.params), strict=True):
        np.testing.assert_array_equal(rounded, matrix)
    del weights["blk.0.attn_k.weight.scale"]
    with pytest.raises(ValueError, match=r"scales of blk\.0\.attn_k\.weight are missing"):
        plan.packed(weights)


def test_losses_are_the_formulas():
    rng = np.random.default_rng(0)
    student, teacher = rng.standard_normal((2, 2, 5, 11)).astype(np.float32) * 3
    tokens, mask = rng.integers(0, 11, (2, 5)), np.arange(5) < np.array([[5], [3]])
    p, q = (np.exp(x.astype(np.float64) / 2) for x in (teacher, student))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    want = 4 * (p * np.log(p / q)).sum(-1)[mask].mean()
    assert abs(training.distillation_loss(student, teacher, mask, 2.0) - want) < 1e-5
    assert not jax.grad(training.distillation_loss, 1)(student, teacher, mask).any()
    q = np.exp(student.astype(np.float64))
    q /= q.sum(-1, keepdims=True)
    scores = np.log(np.take_along_axis(q[:, :-1], tokens[:, 1:, None], -1))[..., 0]
    np.testing.assert_allclose(training.token_logprobs(student, tokens), scores, atol=1e-5)
    assert abs(training.cross_entropy(student, tokens, mask) + scores[mask[:, 1:]].mean()) < 1e-5


def test_checkpointed_layers_have_the_same_gradients_in_less_memory():
    plan = training.plan(tiny_gguf("llama", SHAPE | {"block_count": 6}), "f32", RUN)
    weights, tokens, lengths = plan.weights(), jnp.zeros((4, 128), jnp.int32), jnp.full(4, 128)

    def value(weights, remat):
        out, _ = bj.forward(plan.rounded(weights), tokens, lengths, plan.config, remat=remat)
        return out[:, -1, 3].sum()

    slope = jax.jit(jax.grad(value), static_argnums=1)
    programs = [slope.lower(weights, remat).compile() for remat in (False, True, "offload")]
    plain, again, offloaded = (program(weights) for program in programs)
    for name in weights:
        np.testing.assert_allclose(plain[name], again[name], rtol=1e-3, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(again[name], offloaded[name])
    plain, again, _ = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert again < 0.6 * plain


def test_the_stream_between_checkpointed_layers_goes_to_the_host():
    """In the program of a GPU: of each turn of the forward loop to pinned memory, and back in the backward
    loop's. What that saves: test_aot_transformations.py."""
    plan = training.plan(tiny_gguf("llama", SHAPE | {"block_count": 6}), "f32", RUN)
    weights = jax.eval_shape(plan.weights)

    def value(weights, remat):
        out, _ = bj.forward(plan.rounded(weights), TOKENS, LENGTHS, plan.config, remat=remat)
        return out[:, -1, 3].sum()

    def placed(remat):
        traced = jax.jit(jax.grad(value), static_argnums=1).trace(weights, remat)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
        lines = [line for line in program.splitlines() if "@annotate_device_placement" in line]
        return [re.findall(r'placement = "(\w+)".*-> tensor<(.*?)>', line)[0] for line in lines]

    assert placed(True) == []
    assert sorted(placed("offload")) == [("device", "2x6x128xf32"), ("pinned_host", "2x6x128xf32")]
    with pytest.raises(ValueError, match="remat is 'host'; it must be True, False or \"offload\""):
        value(plan.weights(), "host")


@pytest.mark.parametrize("remat", [False, True])
def test_products_have_the_precision_that_jax_is_set_to(remat):
    """In both passes; without a setting they are exact."""
    plan = training.plan(tiny_gguf("llama", SHAPE), "q1_0", RUN, pure=True)

    def value(weights):
        out, _ = bj.forward(plan.rounded(weights), TOKENS, LENGTHS, plan.config, remat=remat)
        return training.cross_entropy(out, jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))

    def precisions():
        program = jax.make_jaxpr(jax.grad(value))(jax.eval_shape(plan.weights))
        return set(re.findall(r"[^_]precision=\(?([\w.]+)", str(program)))

    assert precisions() == {"Precision.HIGHEST"}
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert precisions() == {"BF16_BF16_F32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", "gemma3", "deepseek2", "qwen35moe", "bitnet"])
def test_other_kinds_of_layers(name, tmp_path):
    """Recurrent states, windows, latent attention, experts: packed as a load has them, and with the same
    gradients where layers are computed again."""
    plan = training.plan(f"synth:tiny-{name}:f32", "q8_0", RUN)
    weights = plan.weights()
    plan.save(tmp_path / "packed.gguf", weights)
    params, loaded = jax.jit(plan.packed)(weights), bj.load(tmp_path / "packed.gguf", RUN)
    assert jax.tree.structure(params) == jax.tree.structure(loaded.params)
    for own, its in zip(jax.tree.leaves(params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(own, its)
    rounded = jax.jit(plan.rounded)(weights)

    def value(vectors, remat):
        out, _ = bj.forward(rounded, vectors, LENGTHS, plan.config, remat=remat)
        return out[0, -1, 3]

    slope = jax.jit(jax.value_and_grad(value), static_argnums=1)
    (plain, first), (again, second) = (slope(bj.embed(rounded, TOKENS), remat) for remat in (False, True))
    assert abs(plain - again) < 1e-5
    np.testing.assert_allclose(first, second, atol=1e-5 * abs(first).max())


def test_what_cannot_be_trained():
    tiny = "synth:tiny-llama:f32"
    with pytest.raises(ValueError, match="format 'q9_9' is not known"):
        training.plan(tiny, "q9_9")
    with pytest.raises(NotImplementedError, match="is a part of another tensor of the file"):
        training.plan("synth:tiny-phi4:f32", "q8_0")
    folded = open_checkpoint("synth:bonsai-2-27b:q1_0")
    with pytest.raises(NotImplementedError, match="stored rotated"):
        training.plan(folded, "q1_0")
    with pytest.raises(NotImplementedError, match="is a Hugging Face folder; training starts from GGUF"):
        training.plan(dataclasses.replace(folded, naming="huggingface"), "q1_0")
    plan = training.plan(tiny, "q8_0", RUN)
    weights = dict.fromkeys(plan.formats, jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"token_embd\.weight is \[2, 2\]; expected \[512, 256\]"):
        plan.packed(weights)
    with pytest.raises(ValueError, match=r"token_embd\.weight is missing; start from plan\.weights"):
        plan.packed({})
    with pytest.raises(ValueError, match=r"teacher has a vocabulary of 7 tokens, the model 512"):
        other = dataclasses.replace(plan.config, vocab_size=7)
        training.distillation_step(plan, optax.sgd(0.1), other)


def test_layers_that_read_other_keys_are_not_computed_again():
    model = gemma4("e2b")
    with pytest.raises(NotImplementedError, match="remat: layers of gemma4 read another layer's keys"):
        bj.forward(model.params, TOKENS, LENGTHS, model.config, remat=True)
