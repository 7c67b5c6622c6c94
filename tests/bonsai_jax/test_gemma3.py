"""Gemma 3 and 2: layers with a window beside layers without, norms after both halves, GELU, softcaps, two
ropes; and the rings of pages in which layers with a window keep their keys.

Against llama.cpp, whose GELU is a table of float16 numbers, and against ourselves with all keys stored.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures, schedules, workspaces
from bonsai_jax.network import cache as kv
from bonsai_jax.network import params as network_params
from bonsai_jax.weights import memory
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, Tensor, open_checkpoint
from pallas_kernels import device
from pallas_kernels.activations import Activation
from tests.agreement import agreement
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file

NAMES = ("tiny-gemma3", "tiny-gemma2")
gemma3_every_day = pytest.mark.parametrize(
    "name", ["tiny-gemma3", pytest.param("tiny-gemma2", marks=pytest.mark.slow)]
)
LENGTHS = (1, 63, 65, 300)  # more than three windows of either: 48 and 80 keys


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@functools.cache
def tiny(name: str) -> bj.Model:
    return bj.load(f"synth:{name}:f32", bj.RunConfig(impl="reference", page_size=16))


def text(model: bj.Model, ids: list[int], count: int, **options) -> list[int]:
    """The tokens of a greedy answer."""
    return bj.generate(model, [ids], max_new_tokens=count, sampling=GREEDY, **options)[0].tokens


def table_gelu(gate, up, math):
    """ggml's GELU: float16 of float16, beyond 10 none."""
    x = gate.astype(jnp.float16).astype(jnp.float32)
    y = 0.5 * x * (1 + jnp.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))
    y = y.astype(jnp.float16).astype(jnp.float32)
    return jnp.where(gate <= -10, 0.0, jnp.where(gate >= 10, gate, y)) * up


def with_activation(model: bj.Model, activation: Activation) -> bj.Model:
    layers = tuple(
        dataclasses.replace(layer, channels=dataclasses.replace(layer.channels, activation=activation))
        for layer in model.config.layers
    )
    return dataclasses.replace(model, config=dataclasses.replace(model.config, layers=layers))


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    """With ggml's GELU the divergence is a tenth of it: the table is what is left between the two."""
    path = as_file(f"synth:{name}:f32", tmp_path / "tiny.gguf")
    model = bj.load(str(path), bj.RunConfig(impl="reference"))
    rows = answers(path, model.tokenizer, [prompt(length) for length in LENGTHS], 12)
    exact = agreement(model, rows)
    table = agreement(with_activation(model, Activation(table_gelu)), rows, padded=True)
    print(f"{name}: {exact}, with ggml's table {table}")
    assert exact.kl < 1e-6 and exact.same_top == 1 and table.kl < 1e-7


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("tiny-gemma3", "q4_k_m"), ("tiny-gemma2", "q8_0"),
        pytest.param("tiny-gemma3", "q8_0", marks=pytest.mark.slow),
        pytest.param("tiny-gemma2", "q4_k_m", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_quantized_files_and_kernels_of_cpus_are_the_same_model(name, format):
    """CPU kernels with 16-bit activations, prefill and steps, beside the reference on the same weights."""
    source, ids = f"synth:{name}:{format}", prompt(150)
    kernels = bj.load(source, bj.RunConfig(activation_bits=16, page_size=16))
    exact = bj.load(source, bj.RunConfig(impl="reference", page_size=16))
    drawn = text(kernels, ids, 12)
    got, want = (bj.logits(model, [*ids, *drawn[:-1]]) for model in (kernels, exact))
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert want[-12:].argmax(-1).tolist() == drawn


def test_each_layer_has_its_window_and_its_rope():
    config = tiny("tiny-gemma3").config
    assert [layer.mixer.window for layer in config.layers] == [48, 48, None, 48, 48]
    assert [layer.mixer.rope.base for layer in config.layers] == [1e4, 1e4, 1e6, 1e4, 1e4]
    assert config.runs == ((0, 1, 2), (2, 1, 1), (3, 1, 2)) and [
        group.layers for group in config.groups("attention")
    ] == [
        (0, 1, 3, 4),
        (2,),
    ]
    assert config.embedding_scale == 16 and config.logit_softcap is None
    config = tiny("tiny-gemma2").config
    assert [layer.mixer.window for layer in config.layers] == [80, None, 80, None]
    assert {layer.mixer.softcap for layer in config.layers} == {50.0} and config.logit_softcap == 30.0


def test_on_a_gpu_kernels_attend_and_one_launch_has_all_products_of_a_layer(monkeypatch):
    """Windows and softcaps are attention's own; only this launch has norms after both halves."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    for name in NAMES:
        description = architectures.describe(open_checkpoint(f"synth:{name}:q4_k"))
        run = load_plans.resolve(description, bj.RunConfig(weights="packed", cache_dtype="float16"))
        step = schedules.step_plan(load_plans.planned(description, run))
        assert {step.schedule(rows) for rows in (1, 2)} == {"layer_products"} and step.unrolled
        assert {step.schedule(rows) for rows in (3, 8, 16, 64)} == {"launches"}
        for group in description.config.groups("attention"):
            assert group.settings.kernels(run) == ("decode", "prefill_sm90")


def test_each_group_of_layers_has_a_workspace_of_its_own():
    """A layer's words have its index in the group as a tag, modulo 3. A layer of another group just before
    it may have the same."""
    model = tiny("tiny-gemma3")
    indices = [model.config.position(number, layer.mixer) for number, layer in enumerate(model.config.layers)]
    assert indices == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3)]
    cache = kv.empty(model.config, model.run, rows=2, context=64)
    spaces = workspaces.empty(model.config, cache, rows=2)
    assert list(spaces) == [("attention", 0), ("attention", 1)]
    assert not any(map(np.any, spaces.values()))


def test_the_largest_models_have_a_scale_of_their_own():
    checkpoint = open_checkpoint("synth:gemma3-12b:q4_k")
    assert architectures.config_of(checkpoint).attention.scale is None
    largest = {"gemma3.block_count": 62, "gemma3.attention.head_count": 32, "gemma3.embedding_length": 5376}
    metadata = checkpoint.metadata | largest
    config = architectures.config_of(dataclasses.replace(checkpoint, metadata=metadata))
    assert config.attention.scale == pytest.approx(168**-0.5)


def test_windows_take_the_memory_of_a_ring():
    """A window of 1,024 keys and a chunk of 512 take 25 pages, not 512; what is allocated is counted."""
    config = architectures.config_of(open_checkpoint("synth:gemma3-12b:q4_k"))
    run = bj.RunConfig(batch_size=2, context=32768, cache_dtype="float16", impl="reference")
    cache = jax.eval_shape(lambda: kv.empty(config, run, 2, 32768))
    full, windowed = (
        next(s for s in cache.states["attention"] if (s.ring is None) == every) for every in (True, False)
    )
    assert (full.num_pages, windowed.num_pages) == (2 * 512, 2 * 25)
    assert (full.k.shape[0], windowed.k.shape[0]) == (8, 40)
    pages = sum(
        leaf.size * leaf.dtype.itemsize
        for s in cache.states["attention"]
        for leaf in jax.tree.leaves((s.k, s.v))
    )
    assert memory.cache_bytes(config, run) == pages
    whole = jax.eval_shape(lambda: kv.empty(config, run, 2, 32768, rewinds=True))
    assert all(state.ring is None for state in whole.states["attention"])


@gemma3_every_day
def test_a_ring_gives_what_all_keys_give(name):
    """1,100 tokens through rings of 512 + window, in chunks and in one call, then steps around the ring."""
    model, ids = tiny(name), prompt(1100)
    every = bj.new_cache(model, 1, 1400, rewinds=True)
    ring = bj.new_cache(model, 1, 1400)
    assert ring.chunk == 512 and not ring.rewinds and every.rewinds
    lengths = jnp.array([len(ids)])
    tokens = jnp.array([ids])
    want, every = bj.jitted.extend(model.params, every, tokens, lengths, model.config)
    got, ring = bj.jitted.extend(model.params, ring, tokens, lengths, model.config)
    np.testing.assert_allclose(got, want, atol=2e-4)
    for step in range(3):
        tokens, lengths = jnp.array([[ids[step]]]), jnp.array([1])
        want, every = bj.jitted.extend(model.params, every, tokens, lengths, model.config)
        got, ring = bj.jitted.extend(model.params, ring, tokens, lengths, model.config)
        np.testing.assert_allclose(got, want, atol=2e-4)
    both = ring.take([0, 0])  # copies of the ring, each with pages of its own
    tokens, lengths = jnp.array([[5], [9]]), jnp.array([1, 1])
    scores, _ = bj.jitted.extend(model.params, both, tokens, lengths, model.config)
    for row, token in enumerate((5, 9)):
        tokens, lengths, copy = jnp.array([[token]]), jnp.array([1]), every.take([0])
        want, _ = bj.jitted.extend(model.params, copy, tokens, lengths, model.config)
        np.testing.assert_allclose(scores[row], want[0], atol=2e-4)


def test_tokens_are_not_taken_back_out_of_a_ring():
    cache = bj.new_cache(tiny("tiny-gemma3"), 1, 1400)
    with pytest.raises(NotImplementedError, match=r"new_cache\(\.\.\., rewinds=True\)"):
        cache.rewind(jnp.array([0]))
    assert bj.new_cache(tiny("tiny-gemma3"), 1, 400).rewinds  # all keys have room: there is no ring


@gemma3_every_day
def test_an_engine_shares_prefixes_by_checkpoints_of_rings(name):
    """Requests that begin alike, beyond the window, one after another and together: each has the text of its
    own, whether its prefix was found or not."""
    model, shared = tiny(name), prompt(700)
    prompts = [shared + prompt(n) for n in (3, 40, 90)]
    want = [text(model, ids, 6) for ids in prompts]
    with bj.Engine(model, max_batch_size=2, context=1024, checkpoints=8) as engine:
        first = [engine.submit(ids, GREEDY, max_new_tokens=6).result() for ids in prompts]
        handles = [engine.submit(ids, GREEDY, max_new_tokens=6) for ids in prompts]
        again = [handle.result() for handle in handles]
    assert [output.tokens for output in first] == want and [output.tokens for output in again] == want
    assert [output.cached_tokens > 0 for output in first] == [False, True, True]


def test_speculation_draws_the_same_text():
    model, ids = tiny("tiny-gemma3"), prompt(20) * 8
    drawn = text(model, ids, 24, speculate="ngram", ignore_eos=True)
    assert bj.logits(model, [*ids, *drawn[:-1]])[-24:].argmax(-1).tolist() == drawn


HUGGING_FACE = {
    "token_embd": "embed_tokens", "output_norm": "norm",
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}, "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip


def folder(name: str, prefix: str = "model.", **changes) -> Checkpoint:
    """The tiny model as a Hugging Face folder, whose norms are less 1."""
    tensors = {}
    for gguf, t in open_checkpoint(f"synth:{name}:f32").tensors.items():
        layer, short = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", gguf).groups()
        values = np.asarray(blocks(t)).view(np.float32).reshape(t.shape)
        values = values - 1 if short.endswith("norm") else values
        own = f"{prefix}{f'layers.{layer}.' if layer else ''}{HUGGING_FACE[short]}.weight"
        data = np.ascontiguousarray(values).view(np.uint8).reshape(*t.shape[:-1], -1)
        tensors[own] = Tensor(own, "f32", t.shape, data)
    config = tiny(name).config
    mixer = config.attention
    metadata = {
        "model_type": name.removeprefix("tiny-"), "num_hidden_layers": config.num_layers, "hidden_size": 256,
        "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": mixer.head_dim, "query_pre_attn_scalar": mixer.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": 2048, "sliding_window": mixer.window, "rope_theta": 1e6,
        "sliding_window_pattern": 3, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    if name == "tiny-gemma2":
        metadata |= {"rope_theta": 1e4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        del metadata["sliding_window_pattern"]
    return Checkpoint("folder", "huggingface", metadata | changes, tensors)


def logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    plan = load_plans.planned(
        description := architectures.describe(checkpoint),
        load_plans.resolve(description, bj.RunConfig(impl="reference")),
    )
    params, tokens = network_params.load(plan), jnp.array([ids])
    return bj.jitted.forward(params, tokens, jnp.array([len(ids)]), plan.config)[0][0]


@pytest.mark.parametrize("name", NAMES)
def test_a_hugging_face_folder_is_the_same_model(name):
    ids = prompt(150)
    want = logits(open_checkpoint(f"synth:{name}:f32"), ids)
    np.testing.assert_allclose(logits(folder(name), ids), want, atol=1e-4)


def test_what_sees_images_is_left_out_and_layer_types_are_read():
    types = [f"{'full' if i == 2 else 'sliding'}_attention" for i in range(5)]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = folder("tiny-gemma3", "language_model.model.", layer_types=types, rope_parameters=ropes)
    tower = Tensor("vision_tower.w", "f32", (1,), np.zeros(4, np.uint8))
    both = Checkpoint(
        "folder", "huggingface", {"model_type": "gemma3", "text_config": text.metadata},
        text.tensors | {"vision_tower.w": tower},
    )  # fmt: skip
    ids = prompt(60)
    np.testing.assert_allclose(logits(both, ids), logits(folder("tiny-gemma3"), ids), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; supported: gelu_pytorch_tanh"),
        ({"attention_bias": True}, "attention_bias is true; supported: false"),
        ({"layer_types": ["full_attention"]}, "layer_types: 5 are expected"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        architectures.config_of(folder("tiny-gemma3", **changes))


def test_a_softcap_has_a_gradient():
    """By the reference, through scores and logits: finite differences."""
    model, ids = tiny("tiny-gemma2"), jnp.array([prompt(6)])
    vectors = bj.embed(model.params, ids)

    def loss(scale):
        return bj.forward(model.params, vectors * scale, jnp.array([6]), model.config)[0][0, -1, 7]

    slope = jax.jit(jax.grad(loss))(1.0)
    near = [float(jax.jit(loss)(1 + step)) for step in (-1e-2, 1e-2)]
    assert slope == pytest.approx((near[1] - near[0]) / 2e-2, rel=0.05)
