"""Architectures with other norms than a Llama: after both halves of a layer and not before, over whole rows,
LayerNorm, before the output matrices; with halves in parallel, scaled logits and xIELU.

Against llama.cpp, in F32; BitNet with a squared ReLU, which llama.cpp lacks, against numpy in float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures, schedules
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint
from pallas_kernels import device
from tests.agreement import agreement, padded_logits
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file
from tests.bonsai_jax.tiny_files import comparable, tiny_gguf

# What each has in config.json beside sizes.
HUGGING_FACE = {
    "tiny-olmo2": {"model_type": "olmo2"},
    "tiny-olmo3": {
        "model_type": "olmo3", "sliding_window": 48,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
        "layer_types": [f"{'full' if number == 3 else 'sliding'}_attention" for number in range(5)],
    },
    "tiny-exaone4": {"model_type": "exaone4", "sliding_window": None},
    "tiny-exaone4-32b": {"model_type": "exaone4", "sliding_window": 48, "sliding_window_pattern": "LLLG"},
    "tiny-command-r": {"model_type": "cohere", "logit_scale": 0.75},
    "tiny-command-r-plus": {"model_type": "cohere", "logit_scale": 0.75, "use_qk_norm": True},
    "tiny-cohere2": {"model_type": "cohere2", "logit_scale": 0.75, "sliding_window": 48},
    "tiny-apertus": {"model_type": "apertus", "hidden_act": "xielu"},
}  # fmt: skip
# Of 64 layers, without which llama.cpp has no windows in EXAONE 4, and no norms by head in Command R.
SIZES = {
    "block_count": 64, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 128,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.value_length": 16,
}  # fmt: skip
LARGE = {
    "tiny-exaone4-32b": SIZES | {
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "attention.sliding_window": 48,
    },
    "tiny-command-r-plus": SIZES | {
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 1e4, "logit_scale": 0.75,
    },
}  # fmt: skip
QUICK = [name for name in (*HUGGING_FACE, "tiny-bitnet") if name not in (*LARGE, "tiny-olmo2")]
ALL = [*QUICK, *LARGE, "tiny-olmo2"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*LARGE, "tiny-olmo2")]
LENGTHS = (1, 63, 65, 300)  # more than three windows of 48
COUNT = 8  # tokens of an answer


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def gguf_file(name: str) -> Checkpoint:
    if name not in LARGE:
        return open_checkpoint(f"synth:{name}:f32")
    drawn = dict.fromkeys(("q_head_norms", "k_head_norms"), (1.0, 0.1))
    architecture = name.removeprefix("tiny-").removesuffix("-32b").removesuffix("-plus")
    return tiny_gguf(architecture, LARGE[name], drawn=drawn, without=("rope_divisors",))


@functools.cache
def tiny(name: str) -> bj.Model:
    return bj.from_checkpoint(gguf_file(name), bj.RunConfig(impl="reference", page_size=16))


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    path = as_file(gguf_file(name), tmp_path / "tiny.gguf")
    model = tiny(name)
    rows = answers(path, model.tokenizer, [prompt(length) for length in LENGTHS], COUNT)
    found = agreement(model, rows, padded=True)
    print(f"{name}: {found}")
    assert found.kl < 1e-6 and found.same_top == 1


# That of most kinds of layers is for every day: windows, with a rope of their own, and a LayerNorm.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tiny-cohere2" else pytest.mark.slow) for name in ALL]
)
def test_tokens_one_by_one_are_those_of_a_text_at_once(name):
    model, ids = tiny(name), prompt(max(LENGTHS))
    (drawn,) = bj.generate(model, [ids], max_new_tokens=COUNT, sampling=GREEDY, ignore_eos=True)
    texts = [[*ids, *drawn.tokens[:-1]], *map(prompt, LENGTHS[:-1])]  # as many as above: one program
    scores = padded_logits(model, texts)[0]
    assert scores[-COUNT:].argmax(-1).tolist() == drawn.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_an_engine_its_prefixes_and_gradients(name):
    """Nothing in them knows these settings: the same text from a found prefix, and slopes of the logits."""
    model, shared = tiny(name), prompt(130)
    prompts = [shared + prompt(n) for n in (3, 40)]
    options = {"max_new_tokens": 6, "ignore_eos": True}
    want = [output.tokens for output in bj.generate(model, prompts, sampling=GREEDY, **options)]
    with bj.Engine(model, max_batch_size=2, context=256, checkpoints=4) as engine:
        outputs = [engine.submit(ids, GREEDY, **options).result() for ids in prompts]
        again = [handle.result() for handle in [engine.submit(ids, GREEDY, **options) for ids in prompts]]
    assert [output.tokens for output in outputs] == [output.tokens for output in again] == want
    assert outputs[1].cached_tokens > 0
    vectors = bj.embed(model.params, jnp.array([prompt(6)]))

    def logit(scale):
        noise = jnp.sin(jnp.arange(vectors.size, dtype=jnp.float32)).reshape(vectors.shape)
        return bj.forward(model.params, vectors + scale * noise, jnp.array([6]), model.config)[0][0, -1, 7]

    slope = jax.jit(jax.grad(logit))(0.0)
    above, below = (float(jax.jit(logit)(step)) for step in (1e-3, -1e-3))
    assert slope == pytest.approx((above - below) / 2e-3, rel=0.05, abs=1e-2)


def values(tensor) -> np.ndarray:
    return np.asarray(blocks(tensor)).view(np.float32).reshape(tensor.shape)


def folder(name: str, **changes) -> Checkpoint:
    """The tiny model as a Hugging Face folder."""
    gguf = gguf_file(name)
    config, arrays = architectures.config_of(gguf), {}
    for spec in architectures.get(config.architecture).TENSORS:
        for layer in spec.layers(config):
            if spec.huggingface is not None and (t := gguf.tensors.get(spec.gguf.format(layer))):
                arrays[spec.huggingface.format(layer)] = values(t)
    for key in [key for key in gguf.metadata if key.startswith("xielu.")]:
        for layer, value in enumerate(gguf.metadata[key]):
            own = f"model.layers.{layer}.mlp.act_fn.{key.removeprefix('xielu.')}"
            arrays[own] = np.array([value], np.float32)
    tensors = {
        own: Tensor(own, "f32", a.shape, np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape[:-1], -1))
        for own, a in arrays.items()
    }
    a = config.attention
    metadata = {
        "num_hidden_layers": config.num_layers, "hidden_size": config.hidden, "head_dim": a.head_dim,
        "intermediate_size": config.layers[0].channels.ffn, "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads, "rope_theta": a.rope.base, "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        f"{'layer' if config.layer_norm else 'rms'}_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }  # fmt: skip
    return Checkpoint("folder", "huggingface", metadata | HUGGING_FACE[name] | changes, tensors)


@pytest.mark.parametrize("name", [name for name in QUICK if name in HUGGING_FACE] + [*SLOW])
def test_a_hugging_face_folder_is_the_same_model(name):
    """The same settings, by which the same weights lie in the same arrays."""
    ours = architectures.describe(folder(name))
    gguf = architectures.describe(gguf_file(name))
    assert comparable(ours.config) == comparable(gguf.config)
    for spec, by_layer in gguf.tensors.items():
        for layer, t in by_layer.items():
            np.testing.assert_array_equal(values(t), values(ours.tensors[spec][layer]))


def test_settings_by_layer():
    def windows(name):
        return [layer.mixer.window for layer in tiny(name).config.layers]

    def ropes(name):
        return [layer.mixer.rope and layer.mixer.rope.scaling for layer in tiny(name).config.layers]

    assert windows("tiny-olmo3") == windows("tiny-cohere2") == [48, 48, 48, None, 48]
    assert ropes("tiny-olmo3") == ["none", "none", "none", "yarn", "none"]
    assert ropes("tiny-cohere2") == ["none", "none", "none", None, "none"]
    assert windows("tiny-exaone4") == [None] * 3 and ropes("tiny-exaone4") == ["none"] * 3
    config = architectures.config_of(gguf_file("tiny-exaone4-32b"))
    assert (
        config.runs == ((0, 4, 16),)
        and config.layers[3].mixer.rope is None
        and config.layers[0].mixer.window == 48
    )
    apertus = tiny("tiny-apertus").config
    assert apertus.runs == ((0, 1, len(apertus.layers)),) and len(apertus.layers[0].channels.constants) == 3


@pytest.mark.parametrize("name", QUICK)
def test_on_a_gpu_norms_after_both_halves_alone_are_in_a_fused_launch(name, monkeypatch):
    """Others run operation by operation, with kernels for their products."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    plan = load_plans.plan(architectures.describe(open_checkpoint(f"synth:{name}:q4_k")), bj.RunConfig())
    step = schedules.step_plan(plan)
    few = "layer_products" if "olmo" in name or "exaone" in name else "launches"
    assert {step.schedule(rows) for rows in (1, 2)} == {few} and step.unrolled
    assert {step.schedule(rows) for rows in (3, 8, 64)} == {"launches"}


def test_bitnet_with_a_squared_relu_is_its_formula():
    """The feed-forward of 2B4T: down(norm(relu(gate n)^2 up n)), n = norm(x), in float64."""
    checkpoint = open_checkpoint("synth:tiny-bitnet:f32")
    metadata = checkpoint.metadata | {"bitnet.hidden_activation": "relu2"}
    model = bj.from_checkpoint(
        dataclasses.replace(checkpoint, metadata=metadata), bj.RunConfig(impl="reference")
    )
    ids = prompt(20)
    taps = bj.Taps(("middle", "hidden", "mlp"))
    _, read = bj.jitted.forward(model.params, jnp.array([ids]), jnp.array([20]), model.config, taps=taps)

    def norm(x, gamma):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * gamma

    for layer in range(model.config.num_layers):
        w = {
            field: np.float64(values(checkpoint.tensors[f"blk.{layer}.ffn_{field}.weight"]))
            for field in ("norm", "gate", "up", "sub_norm", "down")
        }
        n = norm(np.float64(read["middle"][layer, 0]), w["norm"])
        hidden = np.maximum(n @ w["gate"].T, 0) ** 2 * (n @ w["up"].T)
        np.testing.assert_allclose(read["hidden"][layer, 0], hidden, atol=1e-5 * hidden.max())
        added = norm(hidden, w["sub_norm"]) @ w["down"].T
        np.testing.assert_allclose(read["mlp"][layer, 0], added, atol=1e-5)


def test_norms_by_head_are_their_formula():
    """Those of Command R+: LayerNorm of each head by weights of its own; the token at position 0 is not
    turned."""
    checkpoint, norms = open_checkpoint("synth:tiny-command-r:f32"), {}
    for number, (field, heads) in enumerate([("q", 4), ("k", 2)] * 3):
        name = f"blk.{number // 2}.attn_{field}_norm.weight"
        norms[name] = np.random.default_rng(number).normal(1, 0.3, (heads, 64)).astype(np.float32)
    tensors = {name: Tensor(name, "f32", a.shape, a.view(np.uint8)) for name, a in norms.items()}
    both = dataclasses.replace(checkpoint, tensors=checkpoint.tensors | tensors)
    model = bj.from_checkpoint(both, bj.RunConfig(impl="reference"))
    taps = bj.Taps(("q", "k", "rot_q", "rot_k"))
    _, read = bj.jitted.forward(model.params, jnp.array([[7]]), jnp.array([1]), model.config, taps=taps)
    for name, gamma in norms.items():
        layer, field = int(name[4]), name[11]
        x = np.float64(read[field][layer, 0, 0])
        x = x - x.mean(-1, keepdims=True)
        want = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * gamma
        np.testing.assert_allclose(read[f"rot_{field}"][layer, 0, 0], want, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-apertus", {"hidden_act": "silu"}, "hidden_act is 'silu'; supported: xielu"),
        ("tiny-cohere2", {"rotary_pct": 0.5}, "rotary_pct is 0.5; supported: 1"),
        ("tiny-olmo3", {"layer_types": ["full_attention"]}, "layer_types: 5 are expected"),
        (
            "tiny-exaone4",
            {"sliding_window": 48, "sliding_window_pattern": "LX"},
            "layer_types: 3 are expected",
        ),
    ],
)
def test_other_settings_are_refused(name, changes, message):
    with pytest.raises((NotImplementedError, CheckpointError), match=message):
        architectures.config_of(folder(name, **changes))


def test_keys_of_gguf_files_are_checked():
    apertus, bitnet = (open_checkpoint(f"synth:tiny-{name}:f32") for name in ("apertus", "bitnet"))
    few = dataclasses.replace(apertus, metadata=apertus.metadata | {"xielu.beta": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"xielu.beta is .*; one number or a list of 3 is expected"):
        architectures.config_of(few)
    one = dataclasses.replace(apertus, metadata=apertus.metadata | {"xielu.beta": 0.5})
    assert architectures.config_of(one) == architectures.config_of(apertus)
    other = dataclasses.replace(bitnet, metadata=bitnet.metadata | {"bitnet.hidden_activation": "gelu"})
    with pytest.raises(NotImplementedError, match="hidden_activation is 'gelu'; supported: silu, relu2"):
        architectures.config_of(other)
