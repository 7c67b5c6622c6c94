"""Gemma 4: heads of two sizes, a norm of values, keys used as values, a rope that turns a part of the pairs,
experts beside a feed-forward, layers that read another layer's keys, and a vector of each token for each
layer.

Against llama.cpp, whose GELU is a table of float16 numbers.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures, schedules
from bonsai_jax.network import params as network_params
from bonsai_jax.network.kinds import layer_output
from bonsai_jax.weights import memory
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, Tensor
from pallas_kernels import device, selection
from pallas_kernels.activations import Activation
from tests.agreement import agreement, padded_logits
from tests.bonsai_jax.test_gemma3 import table_gelu, with_activation
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file
from tests.bonsai_jax.tiny_files import as_huggingface, logits, tiny_gguf

WINDOW = 48
COMMON = {
    "block_count": 3, "context_length": 2048, "embedding_length": 128, "feed_forward_length": 192,
    "attention.head_count": 4, "attention.head_count_kv": np.array([2, 1, 2], np.int32),
    "attention.key_length": 64, "attention.value_length": 64,
    "attention.key_length_swa": 32, "attention.value_length_swa": 32,
    "rope.dimension_count": 64, "rope.dimension_count_swa": 32,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": np.array([True, False, True]),
    "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
SETTINGS = {
    "31b": COMMON,
    "26b-a4b": COMMON | {
        "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64,
    },
    "e2b": COMMON | {
        "block_count": 5, "attention.head_count_kv": 1, "attention.shared_kv_layers": 2,
        "attention.sliding_window_pattern": np.array([True, True, False, True, False]),
        "feed_forward_length": np.array([192, 192, 192, 384, 384], np.int32),
        "embedding_length_per_layer_input": 32,
    },
}  # fmt: skip
NAMES = [*SETTINGS]
# A router whose choices are no near-ties.
DRAWN = {
    "router_norm": (8.0, 1.0), "down_scale": (1.0, 0.2), "scale": (0.8, 0.1), "embed": (0.0, 0.3),
    "vector_table": (0.0, 0.3),
}  # fmt: skip
SLOW = pytest.mark.slow
TURNED = 8  # of 32 pairs
LENGTHS = (1, 63, 65, 300)  # more than three windows
COUNT = 8  # tokens of an answer


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def tensor(name: str, values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    return Tensor(name, "f32", values.shape, values.view(np.uint8))


def values(t) -> np.ndarray:
    return np.asarray(blocks(t)).view(np.float32).reshape(t.shape)


@functools.cache
def file(name: str, format: str = "f32") -> Checkpoint:
    present = ("blk.2.attn_v.weight", "blk.4.attn_v.weight") if name == "e2b" else ()
    checkpoint = tiny_gguf("gemma4", SETTINGS[name], format, drawn=DRAWN, present=present)
    divisors = tensor("rope_freqs.weight", np.repeat([1.0, 1e30], (TURNED, 32 - TURNED)))
    return dataclasses.replace(checkpoint, tensors=checkpoint.tensors | {divisors.name: divisors})


@functools.cache
def tiny(name: str) -> bj.Model:
    return bj.from_checkpoint(file(name), bj.RunConfig(impl="reference", page_size=16))


def llama_cpp(name: str, folder) -> list[dict]:
    """Its answers to prompts of all lengths."""
    path = as_file(file(name), folder / "tiny.gguf")
    return answers(path, tiny(name).tokenizer, [prompt(length) for length in LENGTHS], COUNT)


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    found = agreement(tiny(name), llama_cpp(name, tmp_path), padded=True)
    print(f"{name}: {found}")
    assert found.kl < 1e-6 and found.same_top == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ggml_s_table_is_what_is_left_between_the_two(name, tmp_path, monkeypatch):
    rows, table = llama_cpp(name, tmp_path), Activation(table_gelu)
    exact = agreement(tiny(name), rows, padded=True)
    monkeypatch.setattr(layer_output, "GELU_TANH", table)
    with_table = agreement(with_activation(tiny(name), table), rows, padded=True)
    print(f"{name}: {exact}, with ggml's table {with_table}")
    assert with_table.kl < min(exact.kl / 5, 1e-7)


@pytest.mark.parametrize(
    "name", [pytest.param("31b", marks=SLOW), pytest.param("26b-a4b", marks=SLOW), "e2b"]
)
def test_tokens_one_by_one_are_those_of_a_text_at_once(name):
    model, ids = tiny(name), prompt(max(LENGTHS))
    (drawn,) = bj.generate(model, [ids], max_new_tokens=COUNT, sampling=GREEDY, ignore_eos=True)
    texts = [[*ids, *drawn.tokens[:-1]], *map(prompt, LENGTHS[:-1])]  # as many as above: one program
    scores = padded_logits(model, texts)[0]
    assert scores[-COUNT:].argmax(-1).tolist() == drawn.tokens


def config_json(name: str) -> dict:
    config = {
        "model_type": "gemma4_text", "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 192,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 32,
        "global_head_dim": 64, "attention_k_eq_v": True, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "sliding_window": WINDOW, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": TURNED / 32, "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention"]
    own = {
        "31b": {},
        "26b-a4b": {
            "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64,
        },
        "e2b": {
            "num_hidden_layers": 5, "num_key_value_heads": 1, "num_global_key_value_heads": None,
            "layer_types": [kinds[0], *kinds, *kinds], "attention_k_eq_v": False, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32,
            "use_bidirectional_attention": None,
        },
    }  # fmt: skip
    return config | own[name]


def folder(name: str, **changes) -> Checkpoint:
    """The tiny model as the folder of a model that also sees images."""
    gguf = file(name)
    rest = {key: t for key, t in gguf.tensors.items() if not key.startswith("rope_freqs")}
    text = config_json(name) | {"tie_word_embeddings": False} | changes
    metadata = {"model_type": "gemma4", "text_config": text}
    made = as_huggingface(dataclasses.replace(gguf, tensors=rest), metadata)
    tensors = dict(made.tensors)
    for key in [key for key in tensors if key.endswith("experts.gate_proj")]:
        both = [values(tensors.pop(key.replace("gate_proj", part))) for part in ("gate_proj", "up_proj")]
        whole = key.replace("gate_proj", "gate_up_proj")
        tensors[whole] = tensor(whole, np.concatenate(both, axis=1))
    # The name of a text model, below which those of vision lie too; and what a folder may have to spare.
    tensors = {key.replace("model.", "model.language_model.", 1): t for key, t in tensors.items()}
    tensors |= {key: tensor(key, np.ones(2)) for key in ("model.vision_tower.x", "model.embed_vision.x")}
    if name == "e2b":
        spare = "model.language_model.layers.3.self_attn.k_proj.weight"
        tensors[spare] = tensor(spare, np.ones((32, 128)))
    return dataclasses.replace(made, tensors=tensors)


@pytest.mark.parametrize("name", [pytest.param("31b", marks=SLOW), "26b-a4b", "e2b"])
def test_a_hugging_face_folder_is_the_same_model(name):
    ids = prompt(70)
    np.testing.assert_allclose(logits(folder(name), ids), logits(file(name), ids), atol=1e-5)


def test_each_layer_has_its_heads_and_its_keys():
    windowed, full, _ = (layer.mixer for layer in tiny("31b").config.layers)
    assert (windowed.head_dim, windowed.num_kv_heads, windowed.window) == (32, 2, WINDOW)
    assert (full.head_dim, full.num_kv_heads, full.window, full.scale) == (64, 1, None, 1.0)
    assert full.keys_as_values and full.v_rows == 0 and not windowed.keys_as_values
    assert windowed.v_norm and full.v_norm and not windowed.rope.divided and full.rope.divided
    assert [layer.mixer.reads for layer in tiny("e2b").config.layers] == [None, None, None, 1, 2]
    assert [layer.channels.ffn for layer in tiny("e2b").config.layers] == [192, 192, 192, 384, 384]
    first, second = (np.asarray(f) for f in tiny("31b").params.rope_frequencies)
    assert (first > 1e-9).all() and (second > 1e-9).sum() == TURNED and len(second) == 32


def test_shapes_of_its_weights_are_found_without_reading_them():
    """As before a GPU's first program; frequencies are divided by a tensor of the file."""
    description = architectures.describe(file("31b"))
    plan = load_plans.planned(description, load_plans.resolve(description, bj.RunConfig(impl="reference")))
    shapes = jax.eval_shape(lambda: network_params.load(plan)).rope_frequencies
    own = tiny("31b").params.rope_frequencies
    assert [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in own]


def test_layers_that_read_other_layers_keys_store_none():
    model = tiny("e2b")
    run = dataclasses.replace(model.run, context=1024)
    cache = bj.new_cache(model, 2, context=1024)
    groups = model.config.groups("attention")
    stored = [state.k is not None and len(state.k) for state in cache.states["attention"]]
    assert stored == [2, 1, False, False] and [group.layers for group in groups] == [(0, 1), (2,), (3,), (4,)]
    alone = dataclasses.replace(model.config, layers=model.config.layers[:3])
    assert memory.bytes_per_token(model.config, run) == memory.bytes_per_token(alone, run) > 0
    assert memory.bytes_per_row(model.config, run) == memory.bytes_per_row(alone, run) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_and_its_prefixes(name):
    model, shared = tiny(name), prompt(130)
    prompts = [shared + prompt(n) for n in (3, 40)]
    options = {"max_new_tokens": 6, "ignore_eos": True}
    want = [output.tokens for output in bj.generate(model, prompts, sampling=GREEDY, **options)]
    with bj.Engine(model, max_batch_size=2, context=256, checkpoints=4) as engine:
        outputs = [engine.submit(ids, GREEDY, **options).result() for ids in prompts]
    assert [output.tokens for output in outputs] == want and outputs[1].cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_in_a_file_and_copies_of_its_rows(name, tmp_path):
    model, ids, more = tiny(name), prompt(100), [5, 6]
    cache = bj.new_cache(model, 1, 256)
    _, cache = bj.extend(model.params, cache, jnp.array([ids]), jnp.array([100]), model.config)
    bj.save_state(tmp_path / "cache.safetensors", cache)
    cache = bj.load_state(tmp_path / "cache.safetensors", model).take([0, 0])
    scores, _ = bj.extend(model.params, cache, jnp.array([more] * 2), jnp.array([2, 2]), model.config)
    want = bj.logits(model, ids + more)[-2:]
    np.testing.assert_allclose(scores[1], want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_quantized_files_and_kernels_of_cpus_are_the_same_model(name, format):
    ids = prompt(150)
    kernels, exact = (
        bj.from_checkpoint(file(name, format), run)
        for run in (bj.RunConfig(activation_bits=16), bj.RunConfig(impl="reference"))
    )
    got, want = (bj.logits(model, ids) for model in (kernels, exact))
    np.testing.assert_allclose(got, want, atol=2e-3)


def test_on_a_gpu_one_launch_has_all_products_of_a_dense_layer(monkeypatch):
    """Its scale as well; attention has what else differs from other models'. Experts, and vectors of a token
    for each layer, are refused."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    widths = {"embedding_length": 256, "feed_forward_length": 256, "attention.head_count": 8}
    reasons = {
        "31b": None,
        "26b-a4b": "is for layers without experts",
        "e2b": "the model has layer_vector, vector, reads",
    }
    for name, reason in reasons.items():
        checkpoint = tiny_gguf("gemma4", SETTINGS[name] | widths, "q8_0", drawn=DRAWN)
        divisors = tensor("rope_freqs.weight", np.ones(32))
        checkpoint = dataclasses.replace(checkpoint, tensors=checkpoint.tensors | {divisors.name: divisors})
        plan = load_plans.plan(architectures.describe(checkpoint), bj.RunConfig())
        step = schedules.step_plan(plan)
        few = "launches" if reason else "layer_products"
        assert [step.schedule(rows) for rows in (1, 2, 3, 16)] == [few, few, "launches", "launches"]
        verdicts = {v.kernel: v.reason for v in selection.explain(schedules.step_problem(plan))}
        assert reason is None or reason in verdicts["layer_products"]


@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_steps_run_operation_by_operation(name, monkeypatch):
    """And by kernels, but for a decode step with another layer's keys; few rows of 31B have two launches a
    layer."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    description = architectures.describe(file(name, "q8_0"))
    run = load_plans.resolve(description, bj.RunConfig(weights="packed", cache_dtype="float16"))
    step = schedules.step_plan(load_plans.planned(description, run))
    few = "layer_products" if name == "31b" else "launches"
    assert [step.schedule(rows) for rows in (1, 2, 8, 64)] == [few, few, "launches", "launches"]
    known = dataclasses.replace(description.config.layers[-1].mixer, head_dim=256, rope=None)
    decode = "reference" if name == "e2b" else "decode"  # which writes the keys that it reads
    assert known.kernels(run) == (decode, "prefill_sm90")


def test_experts_beside_a_feed_forward_are_their_formula():
    """In float64: norm(norm(feed-forward) + norm(experts)), and the router's norm."""
    checkpoint, ids = file("26b-a4b"), prompt(12)
    model = tiny("26b-a4b")
    taps = bj.Taps(("middle", "router", "mlp", "output"))
    _, read = bj.jitted.forward(model.params, jnp.array([ids]), jnp.array([12]), model.config, taps=taps)
    w = {
        name.removeprefix("blk.0."): np.float64(values(t))
        for name, t in checkpoint.tensors.items()
        if name.startswith("blk.0.")
    }
    x = np.float64(read["middle"][0, 0])

    def norm(x, gamma=1.0):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma

    def ffn(x, gate, up, down):
        gate = gate @ x
        return down @ (
            0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * (up @ x)
        )

    logit = norm(x, w["ffn_gate_inp.scale"]) / np.sqrt(128) @ w["ffn_gate_inp.weight"].T
    probability = np.exp(logit) / np.exp(logit).sum(-1, keepdims=True)
    np.testing.assert_allclose(read["router"][0, 0], probability, atol=1e-5)
    for token, p in enumerate(probability):
        dense = [w[f"ffn_{part}.weight"] for part in ("gate", "up", "down")]
        beside = ffn(norm(x[token], w["ffn_norm.weight"]), *dense)
        chosen = np.argsort(-p)[:3]
        n, sparse = norm(x[token], w["pre_ffw_norm_2.weight"]), 0.0
        for e in chosen:
            own = [w[f"ffn_{part}_exps.weight"][e] for part in ("gate", "up", "down")]
            sparse += p[e] / p[chosen].sum() * w["ffn_down_exps.scale"][e] * ffn(n, *own)
        both = norm(beside, w["post_ffw_norm_1.weight"]) + norm(sparse, w["post_ffw_norm_2.weight"])
        want = norm(both, w["post_ffw_norm.weight"])
        np.testing.assert_allclose(read["mlp"][0, 0, token], want, atol=1e-5)
    scaled = w["layer_output_scale.weight"] * (x + np.float64(read["mlp"][0, 0]))
    np.testing.assert_allclose(read["output"][0, 0], scaled, atol=1e-5)


def test_vectors_in_place_of_tokens_are_refused_where_tokens_are_looked_up_in_every_layer():
    model = tiny("e2b")
    vectors = np.zeros((3, 128), np.float32)
    message = re.escape("gemma4 with per-layer embeddings looks tokens up by their ids in every layer")
    with pytest.raises(NotImplementedError, match=message):
        bj.generate(model, vectors, max_new_tokens=1)
    with pytest.raises(NotImplementedError, match=message):
        bj.forward(model.params, vectors[None], jnp.array([3]), model.config)


@pytest.mark.slow
def test_gradients_by_the_reference():
    model = tiny("31b")
    vectors = bj.embed(model.params, jnp.array([prompt(6)]))

    def logit(scale):
        noise = jnp.sin(jnp.arange(vectors.size, dtype=jnp.float32)).reshape(vectors.shape)
        return bj.forward(model.params, vectors + scale * noise, jnp.array([6]), model.config)[0][0, -1, 7]

    slope = jax.jit(jax.grad(logit))(0.0)
    above, below = (float(jax.jit(logit)(step)) for step in (1e-3, -1e-3))
    assert slope == pytest.approx((above - below) / 2e-3, rel=0.05, abs=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; supported: gelu_pytorch_tanh"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_kv_shared_layers": 2}, "the last 2 of 3 layers share keys of none of the others"),
    ],
)
def test_other_settings_are_refused(changes, message):
    with pytest.raises((NotImplementedError, CheckpointError), match=message):
        architectures.config_of(folder("31b", **changes))


def test_a_file_without_the_divisors_of_its_rope_is_refused():
    rest = {key: t for key, t in file("31b").tensors.items() if key != "rope_freqs.weight"}
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs\.weight is missing"):
        architectures.describe(dataclasses.replace(file("31b"), tensors=rest))


@pytest.mark.slow
def test_taps_of_heads_of_two_sizes_are_read_apart():
    model, ids = tiny("31b"), jnp.array([prompt(6)])
    message = r"Taps: q is \[1, 6, 4, 32\] and \[1, 6, 4, 64\] in different layers"
    with pytest.raises(ValueError, match=message):
        bj.forward(model.params, ids, jnp.array([6]), model.config, taps=bj.Taps("q"))
    taps = bj.Taps(("q", "v"), layers=1)
    _, read = bj.forward(model.params, ids, jnp.array([6]), model.config, taps=taps)
    assert read["q"].shape == (1, 1, 6, 4, 64) and read["v"].shape == (1, 1, 6, 1, 64)
