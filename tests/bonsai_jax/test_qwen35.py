"""Qwen3.5's layers: the gated delta net and its state beside the cache, gated attention with partial rope.

Held against a forward in numpy's float64 that shares no code with us; llama.cpp: test_oracle_lengths.py.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import card
from bonsai_jax.cli.chat import Conversation
from bonsai_jax.cli.chat.local import Local
from bonsai_jax.measure import evaluate
from bonsai_jax.network import architectures
from bonsai_jax.network import cache as kv
from bonsai_jax.network import params as network_params
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.weights import memory
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint
from pallas_kernels import delta_net
from tests.bonsai_jax.test_speculation import two_layers

TINY = "synth:tiny-qwen35:f32"
GREEDY = bj.SamplingParams(temperature=0.0)


@functools.cache
def tiny() -> bj.Model:
    return bj.load(TINY, bj.RunConfig(page_size=16, impl="reference"))


@functools.cache
def few() -> bj.Model:
    """A layer of each kind."""
    return bj.from_checkpoint(two_layers(open_checkpoint(TINY)), bj.RunConfig(context=512, impl="reference"))


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def in_float64(tokens: list[int]) -> np.ndarray:
    """Logits after every token, one token at a time, from the description of the architecture."""
    checkpoint = open_checkpoint(TINY)
    m = {key.removeprefix("qwen35."): value for key, value in checkpoint.metadata.items()}
    w = {
        name: np.asarray(blocks(t)).view(np.float32).reshape(t.shape).astype(np.float64)
        for name, t in checkpoint.tensors.items()
    }
    eps, heads, kv_heads = m["attention.layer_norm_rms_epsilon"], m["attention.head_count"], 2
    k_heads, v_heads, size = m["ssm.group_count"], m["ssm.time_step_rank"], m["ssm.state_size"]
    turned, inner = m["rope.dimension_count"], m["ssm.inner_size"]
    theta = m["rope.freq_base"] ** (-np.arange(turned // 2) * 2 / turned)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[name]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def turn(x, position):
        z = (x[:, : turned // 2] + 1j * x[:, turned // 2 : turned]) * np.exp(1j * position * theta)
        return np.concatenate([z.real, z.imag, x[:, turned:]], axis=1)

    keys, values, seen, states, out = {}, {}, {}, {}, []
    for position, token in enumerate(tokens):
        x = w["token_embd.weight"][token]
        for layer in range(m["block_count"]):
            b = f"blk.{layer}."
            n = norm(x, b + "attn_norm.weight")
            if (layer + 1) % m["full_attention_interval"] == 0:
                of_head = (w[b + "attn_q.weight"] @ n).reshape(heads, 2, -1)
                q = turn(norm(of_head[:, 0], b + "attn_q_norm.weight"), position)
                k = norm((w[b + "attn_k.weight"] @ n).reshape(kv_heads, -1), b + "attn_k_norm.weight")
                keys.setdefault(layer, []).append(turn(k, position))
                values.setdefault(layer, []).append((w[b + "attn_v.weight"] @ n).reshape(kv_heads, -1))
                K, V = np.stack(keys[layer], 1), np.stack(values[layer], 1)  # [kv heads, tokens, D]
                y = []
                for h in range(heads):
                    s = K[h // (heads // kv_heads)] @ q[h] / np.sqrt(q.shape[1])
                    p = np.exp(s - s.max())
                    y.append(p @ V[h // (heads // kv_heads)] / p.sum() * sigmoid(of_head[h, 1]))
                x = x + w[b + "attn_output.weight"] @ np.concatenate(y)
            else:
                seen.setdefault(layer, []).append(w[b + "attn_qkv.weight"] @ n)
                u = sum(
                    w[b + "ssm_conv1d.weight"][:, -1 - back] * made
                    for back, made in enumerate(seen[layer][: -5 if len(seen[layer]) > 4 else None : -1])
                )
                u = u * sigmoid(u)
                q, k, v = np.split(u, [k_heads * size, 2 * k_heads * size])
                beta = sigmoid(w[b + "ssm_beta.weight"] @ n)
                step = np.log1p(np.exp(w[b + "ssm_alpha.weight"] @ n + w[b + "ssm_dt.bias"]))
                decay, y = np.exp(w[b + "ssm_a"] * step), []
                S = states.setdefault(layer, np.zeros((v_heads, size, inner // v_heads)))
                for h in range(v_heads):
                    of_k = slice(h % k_heads * size, h % k_heads * size + size)
                    qh, kh = (a[of_k] / max(np.linalg.norm(a[of_k]), eps) for a in (q, k))
                    S[h] *= decay[h]
                    S[h] += np.outer(kh, beta[h] * (v.reshape(v_heads, -1)[h] - S[h].T @ kh))
                    y.append(norm(S[h].T @ qh / np.sqrt(size), b + "ssm_norm.weight"))
                z = w[b + "attn_gate.weight"] @ n
                x = x + w[b + "ssm_out.weight"] @ (np.concatenate(y) * z * sigmoid(z))
            n = norm(x, b + "post_attention_norm.weight")
            gate = w[b + "ffn_gate.weight"] @ n
            x = x + w[b + "ffn_down.weight"] @ (gate * sigmoid(gate) * (w[b + "ffn_up.weight"] @ n))
        out.append(w["output.weight"] @ norm(x, "output_norm.weight"))
    return np.stack(out)


def extended(cache, rows: list[list[int]], width: int = 80):
    """Logits of each row's tokens, and the cache; one width, so that it is compiled once."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, of in zip(tokens, rows, strict=True):
        row[: len(of)] = of
    lengths = jnp.array([len(row) for row in rows], jnp.int32)
    out, cache = bj.jitted.extend(tiny().params, cache, tokens, lengths, tiny().config)
    return [of[: len(row)] for of, row in zip(np.asarray(out), rows, strict=True)], cache


def states(cache) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(cache.states["delta_net"][0])]


def test_chunks_and_steps_are_float64_s():
    """70 tokens: in chunks, and in two pieces; and 20 a token at a time."""
    prompt = ids(70)
    want = in_float64(prompt)
    at_once, cache = extended(bj.new_cache(tiny(), 3, 96), [prompt, prompt[:5], prompt[:20]])
    for of_row in at_once:
        np.testing.assert_allclose(of_row, want[: len(of_row)], atol=2e-4)
    rest, in_pieces = extended(cache, [[], prompt[5:], []])
    np.testing.assert_allclose(rest[1], want[5:], atol=2e-4)
    one_by_one = bj.new_cache(tiny(), 1, 96)
    steps = []
    for token in prompt[:20]:
        (of_token,), one_by_one = extended(one_by_one, [[token]], width=1)
        steps.append(of_token[0])
    np.testing.assert_allclose(steps, want[:20], atol=2e-4)
    for read, stepped in zip(states(in_pieces), states(one_by_one), strict=True):
        np.testing.assert_allclose(read[:, 1], read[:, 0], atol=1e-5)
        np.testing.assert_allclose(read[:, 2], stepped[:, 0], atol=1e-5)


def test_rows_do_not_see_each_other_and_leave_nothing():
    """Bitwise: neighbours of other lengths, a row that stands still, one that was used before."""
    prompt, other = ids(70, 1), ids(41, 2)
    first, cache = extended(bj.new_cache(tiny(), 3, 96), [prompt, other, ids(9)])
    again, beside = extended(bj.new_cache(tiny(), 3, 96), [prompt, ids(3), ids(80, 3)])
    np.testing.assert_array_equal(first[0], again[0])
    before = states(cache)
    _, cache = extended(cache, [[], [1, 2, 3], []])
    for old, new in zip(before, states(cache), strict=True):
        np.testing.assert_array_equal(old[:, [0, 2]], new[:, [0, 2]])
        assert (old[:, 1] != new[:, 1]).any()
    used, _ = extended(beside.reset(jnp.array([False, True, True])), [[], other, prompt])
    np.testing.assert_array_equal(used[1], first[1])
    np.testing.assert_array_equal(used[2], first[0])


def test_taken_rows_and_saved_caches_go_on(tmp_path):
    prompt = ids(50, 4)
    want, _ = extended(bj.new_cache(tiny(), 3, 96), [prompt, [], []])
    _, cache = extended(bj.new_cache(tiny(), 3, 96), [ids(7), prompt[:30], []])
    bj.save_state(tmp_path / "cache", cache)
    for again in cache.take(jnp.array([1, 1, 0])), bj.load_state(tmp_path / "cache", tiny()).take([1, 1, 0]):
        rest, _ = extended(again, [prompt[30:], prompt[30:], []])
        for of_row in rest[:2]:
            np.testing.assert_allclose(of_row, want[0][30:], atol=1e-4)
    config = tiny().config
    other = dataclasses.replace(config.delta_net, v_heads=2)
    layers = tuple(
        dataclasses.replace(layer, mixer=other) if layer.mixer == config.delta_net else layer
        for layer in config.layers
    )
    wrong = dataclasses.replace(tiny(), config=dataclasses.replace(config, layers=layers))
    with pytest.raises(ValueError, match=r"this state has recurrent states .* but the model"):
        bj.load_state(tmp_path / "cache", wrong)


def test_states_in_16_bits_predict_nearly_the_same():
    """A prompt, then the 40 tokens that a model with states in float16 makes of it, one by one. The KL from
    float32 is 5e-8 on average. The tails of convolutions stay float32."""
    half = bj.load(TINY, bj.RunConfig(page_size=16, impl="reference", state_dtype="float16"))
    prompt = ids(30, 7)
    (output,) = bj.generate(half, [prompt], max_new_tokens=41, sampling=GREEDY, ignore_eos=True)

    def read(model: bj.Model):
        (logits,), cache = extended(bj.new_cache(model, 1, 96), [prompt])
        out = [logits[-1]]
        for token in output.tokens[:-1]:
            (logits,), cache = extended(cache, [[token]], width=1)
            out.append(logits[-1])
        return np.stack(out), cache

    (exact, full), (rounded, cache) = read(tiny()), read(half)
    assert rounded.argmax(-1).tolist() == output.tokens
    (state,), (full_state,) = cache.states["delta_net"], full.states["delta_net"]
    assert (state.s.dtype, state.tail.dtype) == (jnp.float16, jnp.float32)
    assert (full_state.s.dtype, full_state.tail.dtype) == (jnp.float32, jnp.float32)
    assert memory.bytes_per_row(half.config, half.run) == state.s.nbytes + state.tail.nbytes
    assert full_state.s.nbytes == 2 * state.s.nbytes and full_state.tail.nbytes == state.tail.nbytes
    kl = evaluate.kl_divergence(*map(evaluate.log_softmax, (exact, rounded)))
    print(f"KL {kl.mean():.1e}, at most {kl.max():.1e}")
    assert 1e-9 < kl.mean() < 3e-7


def test_numbers_of_a_state_beyond_those_of_float16_are_the_largest():
    """Values near 1e6, and decays near 1, so that the state grows. A chunk is read, then one more token."""
    weights = {
        "conv": jnp.zeros((1, 256, 4)).at[:, :, -1].set(1.0),
        "norm": jnp.ones((1, 64)),
        "decay": jnp.full((1, 2), -1e-6),
        "dt": jnp.zeros((1, 2)),
    }
    step = jax.jit(functools.partial(delta_net, layer=0, **weights, eps=1e-6, grouped=False))
    qkv_z = jax.random.normal(jax.random.key(0), (1, 12, 256 + 128)).at[:, :, 128:256].multiply(1e6)
    gates, positions = jnp.ones((1, 12, 4)), jnp.arange(12, dtype=jnp.int32)[None]
    states, tails = jnp.zeros((1, 1, 2, 64, 64), jnp.float16), jnp.zeros((1, 1, 4, 256))
    for part in (slice(0, 11), slice(11, 12)):
        own = (x[:, part] for x in (qkv_z, gates))
        y, states, tails = step(*own, states, tails, positions[:, part])
        assert np.isfinite(y).all() and float(jnp.abs(states).max()) == 65504


def test_a_state_cannot_be_rewound_and_says_so():
    cache = bj.new_cache(tiny(), 1, 32)
    with pytest.raises(NotImplementedError, match=r"cache\.take.*cache\.reset"):
        cache.rewind(jnp.array([1]))


def test_taps_read_every_layer_and_gradients_pass_the_chunks():
    """Sites of all layers are stacked over all, those of attention over the layers that have it. A gradient
    is a difference's."""
    taps, prompt = bj.Taps(read={"attention", "output", "q"}), np.array([ids(7)])
    _, kept = bj.jitted.forward(tiny().params, prompt, jnp.array([7]), tiny().config, taps=taps)
    assert {site: value.shape[0] for site, value in kept.items()} == {"attention": 4, "output": 4, "q": 1}
    assert np.isfinite(kept["output"]).all()
    model = few()
    vectors = bj.embed(model.params, np.array([ids(70)]))

    @jax.jit
    @jax.value_and_grad
    def run(vectors):
        return bj.forward(model.params, vectors, jnp.array([70]), model.config)[0][0, -1, 7]

    loss, gradient = run(vectors)
    direction = np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    near = [float(run(vectors + step * direction)[0]) for step in (-1e-2, 1e-2)]
    assert abs((near[1] - near[0]) / 2e-2 - float((gradient * direction).sum())) < 2e-2
    assert np.isfinite(loss)


def test_memory_counts_states():
    checkpoint = open_checkpoint("synth:bonsai-27b:q1_0")
    config = architectures.config_of(checkpoint)
    run = bj.RunConfig(batch_size=2, context=128, cache_dtype="float16")
    state_bytes = memory.bytes_per_row(config, run)
    assert state_bytes == 48 * 4 * (48 * 128 * 128 + 4 * 10240)  # 151 MB and 7.9 MB
    assert memory.bytes_per_token(config, run) == 65536
    assert memory.cache_bytes(config, run) == 2 * (128 * 65536 + state_bytes)
    assert card.decode_bytes(0, config, run, [5]) == 5 * 65536 + 2 * state_bytes
    assert config.runs == ((0, 4, 16),) and len(config.layers_with("delta_net")) == 48
    assert config.layers_with("attention")[:2] == (3, 7)
    assert config.position(7, config.attention) == (0, 1) and config.position(7, config.mlp) == (0, 7)
    assert config.position(6, config.delta_net) == (0, 5) and config.position(6, config.mlp) == (0, 6)
    states = jax.tree.leaves(jax.eval_shape(lambda: kv.empty_states(config, run, Room(1, 64)))["delta_net"])
    assert sum(4 * leaf.size for leaf in states) == state_bytes
    half = dataclasses.replace(run, state_dtype="float16")
    assert memory.bytes_per_row(config, half) == 48 * (2 * 48 * 128 * 128 + 4 * 4 * 10240)  # 75 and 7.9 MB
    assert memory.bytes_per_token(config, half) == 65536
    states = jax.tree.leaves(jax.eval_shape(lambda: kv.empty_states(config, half, Room(1, 64)))["delta_net"])
    assert sum(leaf.dtype.itemsize * leaf.size for leaf in states) == memory.bytes_per_row(config, half)


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("ssm.inner_size", 250, r"qwen35\.ssm\.inner_size is 250; a multiple of its 4 v heads"),
        ("ssm.group_count", 3, "4 v heads do not divide into 3 k heads"),
        ("ssm.conv_kernel", 1, "sees 1 tokens"),
        ("attention.recurrent_layers", [1, 1], r"recurrent_layers is \[1, 1\]; a list of 4 values"),
        ("rope.dimension_count", 63, "rope: 63 values of a head turn; expected an even number"),
        ("rope.scaling.type", "yarn", "'yarn'; supported: none"),
        ("attention.value_length", 32, r"value_length is 32, but only head_dim \(64\)"),
    ],
)
def test_what_the_metadata_says_wrong_is_named(key, value, says):
    checkpoint = open_checkpoint(TINY)
    metadata = dict(checkpoint.metadata) | {f"qwen35.{key}": value}
    with pytest.raises((CheckpointError, NotImplementedError), match=says):
        architectures.config_of(dataclasses.replace(checkpoint, metadata=metadata))


def test_layers_may_be_listed_one_by_one():
    checkpoint = open_checkpoint(TINY)
    metadata = dict(checkpoint.metadata) | {"qwen35.attention.recurrent_layers": np.array([0, 1, 0, 1])}
    config = architectures.config_of(dataclasses.replace(checkpoint, metadata=metadata))
    assert config.layers_with("attention") == (0, 2) and config.runs == ((0, 2, 2),)


def test_a_draft_layer_is_left_aside():
    """It is counted among the blocks. Tensors of a layer that no key speaks of are an error as ever."""
    checkpoint = open_checkpoint(TINY)
    own = {name.replace("blk.2.", "blk.4."): t for name, t in checkpoint.tensors.items() if "blk.2." in name}
    own["blk.4.nextn.eh_proj.weight"] = checkpoint.tensors["blk.0.ffn_up.weight"]
    more = dataclasses.replace(checkpoint, tensors=dict(checkpoint.tensors) | own)
    keys = dict(checkpoint.metadata) | {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    found = load_arrays(dataclasses.replace(more, metadata=keys))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(load_arrays(checkpoint)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(CheckpointError, match=r"qwen35 has no place for tensor blk\.4\."):
        load_arrays(more)


def load_arrays(checkpoint):
    run = bj.RunConfig(impl="reference", weights="packed", batch_size=1)
    return network_params.load(load_plans.plan(architectures.describe(checkpoint), run))


def folder(of_many_modes: bool = False) -> Checkpoint:
    """The Hugging Face folder of the tiny model: v heads grouped by their k heads, A_log, norms less 1, the
    convolution as torch has it; and in a folder that sees images under other names, with what sees them."""
    file = open_checkpoint(TINY)
    prefix = "model.language_model." if of_many_modes else "model."
    names = {spec.gguf: spec.huggingface for spec in architectures.get("qwen35").TENSORS}
    grouped, tensors = [0, 2, 1, 3], {}  # v head h of GGUF's uses k head h % 2
    for name, t in file.tensors.items():
        layer, found = re.search(r"\.(\d+)\.", name), re.sub(r"\.\d+\.", ".{}.", name)
        w = np.asarray(blocks(t)).view(np.float32).reshape(t.shape)
        if found.endswith(("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")):
            w = w[grouped]
        elif found.endswith("attn_gate.weight"):
            w = w.reshape(4, 64, -1)[grouped].reshape(w.shape)
        elif found.endswith("ssm_out.weight"):
            w = w.reshape(-1, 4, 64)[:, grouped].reshape(w.shape)
        elif found.endswith(("attn_qkv.weight", "ssm_conv1d.weight")):
            v = w[256:].reshape(4, 64, -1)[grouped].reshape(256, -1)
            w = np.concatenate([w[:256], v])
        if found.endswith("norm.weight") and "ssm" not in found:
            w = w - 1
        w = np.log(-w) if found.endswith("ssm_a") else w
        w = w[:, None] if found.endswith("conv1d.weight") else w
        name = names[found].format(*(layer.groups() if layer else ())).replace("model.", prefix, 1)
        raw = np.ascontiguousarray(w).view(np.uint8).reshape(*w.shape[:-1], -1)
        tensors[name] = Tensor(name, "f32", w.shape, raw)
    m = {key.removeprefix("qwen35."): value for key, value in file.metadata.items()}
    text = {
        "model_type": "qwen3_5_text", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
        "rms_norm_eps": m["attention.layer_norm_rms_epsilon"], "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "full_attention_interval": 3,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25},
    }  # fmt: skip
    if of_many_modes:
        text["layer_types"] = 2 * ["linear_attention"] + ["full_attention", "linear_attention"]
        extra = tensors[f"{prefix}norm.weight"]
        tensors |= {"model.visual.merger.norm.weight": extra, "mtp.norm.weight": extra}
        text = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    return Checkpoint("folder", "huggingface", text, tensors)


@pytest.mark.parametrize("of_many_modes", [False, True])
def test_a_hugging_face_folder_is_the_same_model(of_many_modes):
    made = folder(of_many_modes)
    config = architectures.config_of(made)
    mixers = [[layer.mixer.kind for layer in one.layers] for one in (config, tiny().config)]
    assert config.delta_net.grouped and mixers[0] == mixers[1]
    want = extended(bj.new_cache(tiny(), 3, 96), [ids(7), [], []])[0][0]
    got = bj.jitted.forward(load_arrays(made), np.array([ids(7)]), jnp.array([7]), config)[0][0]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_a_conversation_goes_on_and_begins_anew():
    """Where the row held other text than the conversation, it begins anew: nothing is rewound."""
    model, greedy = few(), bj.SamplingParams(temperature=0.0)

    def talking(**more):
        return Conversation(Local(bj.Engine(model, max_batch_size=1)), greedy, max_new_tokens=4, **more)

    def said(conversation, text):
        return "".join(piece.text for piece in conversation.ask(text))

    talk = talking()
    said(talk, "in the")
    second = said(talk, "and")
    messages = talk.messages[:2]
    assert said(talking(messages=messages), "and") == second
    talk.reset()
    other = said(talk, "or")
    assert said(talking(), "or") == other
