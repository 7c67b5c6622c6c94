"""Qwen3 with a mixture of experts: routing, products by expert, dense layers among those of experts.

Held against a forward in numpy's float64 that shares no code with us; llama.cpp: test_oracle_tiny.py.
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
from bonsai_jax.network import architectures
from bonsai_jax.network import params as network_params
from bonsai_jax.weights import memory
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint

TINY = "synth:tiny-qwen3moe:f32"


@functools.cache
def tiny() -> bj.Model:
    return bj.load(TINY, bj.RunConfig(page_size=16, impl="reference"))


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    tensors = open_checkpoint(TINY).tensors.items()
    return {name: np.asarray(blocks(t)).view(np.float32).reshape(t.shape) for name, t in tensors}


def in_float64(tokens: list[int], normalized=True, banned: int | None = None):
    """Logits after every token, from the description of the architecture, and of each layer and token the
    chosen experts. banned: an expert of every layer that none goes to."""
    m = {key.removeprefix("qwen3moe."): value for key, value in open_checkpoint(TINY).metadata.items()}
    w = {name: of.astype(np.float64) for name, of in arrays().items()}
    eps, heads, kv_heads, size = m["attention.layer_norm_rms_epsilon"], 4, 2, m["attention.key_length"]
    theta = m["rope.freq_base"] ** (-np.arange(size // 2) * 2 / size)
    T = len(tokens)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[name]

    def heads_of(x, name, count, normed):
        y = (x @ w[name].T).reshape(T, count, size)
        if normed is None:
            return y
        y = norm(y, normed)
        z = (y[..., : size // 2] + 1j * y[..., size // 2 :]) * np.exp(
            1j * np.arange(T)[:, None, None] * theta
        )
        return np.concatenate([z.real, z.imag], axis=-1)

    x, chosen = w["token_embd.weight"][tokens], []
    for layer in range(m["block_count"]):
        b = f"blk.{layer}."
        n = norm(x, b + "attn_norm.weight")
        q = heads_of(n, b + "attn_q.weight", heads, b + "attn_q_norm.weight")
        k = heads_of(n, b + "attn_k.weight", kv_heads, b + "attn_k_norm.weight").repeat(2, axis=1)
        v = heads_of(n, b + "attn_v.weight", kv_heads, None).repeat(2, axis=1)
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        s = np.where(np.tril(np.ones((T, T), bool)), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(T, -1) @ w[b + "attn_output.weight"].T
        n = norm(x, b + "ffn_norm.weight")
        score = n @ w[b + "ffn_gate_inp.weight"].T
        p = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
        if banned is not None:
            p[:, banned] = 0
        chosen.append(np.argsort(-p, axis=-1)[:, : m["expert_used_count"]])
        for t in range(T):
            sums = p[t, chosen[-1][t]].sum() if normalized else 1.0
            for e in chosen[-1][t]:
                gate, up = (w[f"{b}ffn_{name}_exps.weight"][e] @ n[t] for name in ("gate", "up"))
                y = w[b + "ffn_down_exps.weight"][e] @ (gate / (1 + np.exp(-gate)) * up)
                x[t] += p[t, e] / sums * y
    return norm(x, "output_norm.weight") @ w["output.weight"].T, np.stack(chosen)


def extended(cache, rows: list[list[int]], width: int = 80):
    """Logits of each row's tokens, and the cache; one width, so that it is compiled once."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, of in zip(tokens, rows, strict=True):
        row[: len(of)] = of
    lengths = jnp.array([len(row) for row in rows], jnp.int32)
    out, cache = bj.jitted.extend(tiny().params, cache, tokens, lengths, tiny().config)
    return [of[: len(row)] for of, row in zip(np.asarray(out), rows, strict=True)], cache


def test_prefill_and_steps_are_float64_s():
    """70 tokens at once, whose pairs are tiles of several rows, and 20 a token at a time."""
    prompt = ids(70)
    want, _ = in_float64(prompt)
    at_once, _ = extended(bj.new_cache(tiny(), 3, 96), [prompt, prompt[:5], []])
    np.testing.assert_allclose(at_once[0], want, atol=2e-4)
    np.testing.assert_allclose(at_once[1], want[:5], atol=2e-4)
    cache, steps = bj.new_cache(tiny(), 1, 96), []
    for token in prompt[:20]:
        (of_token,), cache = extended(cache, [[token]], width=1)
        steps.append(of_token[0])
    np.testing.assert_allclose(steps, want[:20], atol=2e-4)


def test_rows_do_not_see_each_other():
    """Bitwise, though their tokens share tiles: neighbours of other lengths and other text."""
    prompt = ids(70, 1)
    first, _ = extended(bj.new_cache(tiny(), 3, 96), [prompt, ids(41, 2), ids(9)])
    again, _ = extended(bj.new_cache(tiny(), 3, 96), [prompt, ids(3), ids(80, 3)])
    np.testing.assert_array_equal(first[0], again[0])


def test_taps_read_and_ban_experts_and_gradients_pass_them():
    """What the router says can be read and edited ahead of the choice; the gradient is a difference's."""
    prompt, run, config = np.array([ids(40)]), tiny().params, tiny().config
    read = {"router", "experts", "expert_weights", "hidden"}

    def ban(site, layer, x):
        return x.at[..., 2].set(0.0)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
    def banned(run, vectors):
        taps = bj.Taps(read=read, edit=ban, at={"router"})
        out, kept = bj.forward(run, vectors, jnp.array([40]), config, taps=taps)
        return out[0, -1, 7], (out, kept)

    vectors = bj.embed(run, prompt)
    (_, (out, kept)), gradient = banned(run, vectors)
    want, chosen = in_float64(ids(40), banned=2)
    np.testing.assert_allclose(out[0], want, atol=2e-4)
    np.testing.assert_array_equal(kept["experts"][:, 0], chosen)
    assert not (kept["experts"] == 2).any() and kept["hidden"].shape == (3, 1, 40, 3, 256)
    np.testing.assert_allclose(kept["expert_weights"].sum(-1), 1, rtol=1e-6)
    direction = np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    near = [float(banned(run, vectors + step * direction)[0][0]) for step in (-1e-3, 1e-3)]
    assert abs((near[1] - near[0]) / 2e-3 - float((gradient * direction).sum())) < 2e-2


def test_one_program_for_many_prompts_under_vmap():
    """Of a model whose experts' weights stay as the softmax gives them."""
    config = tiny().config
    experts = dataclasses.replace(config.experts, normalized=False)
    layers = tuple(dataclasses.replace(layer, channels=experts) for layer in config.layers)
    config = dataclasses.replace(config, layers=layers)
    prompts, lengths = np.array([ids(6, 1), ids(6, 2)]), jnp.array([6])

    def one(params, tokens):
        return bj.forward(params, tokens[None], lengths, config)

    got, _ = jax.jit(jax.vmap(one, (None, 0)))(tiny().params, prompts)
    for logits, seed in zip(got, (1, 2), strict=True):
        want, _ = in_float64(ids(6, seed), normalized=False)
        np.testing.assert_allclose(logits[0], want, atol=2e-4)


def test_a_step_reads_the_experts_that_it_uses():
    checkpoint = open_checkpoint("synth:qwen3-30b-a3b:q4_k_m")
    description = architectures.describe(checkpoint)
    config = description.config
    assert (config.experts.count, config.experts.used, config.runs) == (128, 8, ((0, 1, 48),))
    expert_bytes = sum(t.nbytes for name, t in checkpoint.tensors.items() if "_exps" in name)
    run = bj.RunConfig(weights="packed", cache_dtype="float16")
    everything = memory.weight_bytes(description, run) - checkpoint.tensors["token_embd.weight"].nbytes
    assert card.step_bytes(description, run) == everything - expert_bytes * 120 // 128
    assert 0.06 < config.experts.share_read(1) < 0.0626 and config.experts.share_read(1000) > 0.999
    many, one = (network_params.decode_bytes(tiny().params, tiny().config, rows) for rows in (10**6, 1))
    unread = many - one
    assert unread == 3 * 3 * 8 * 256 * 256 * 4 * 5 // 8


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("expert_used_count", 9, "9 of 8 experts are used for a token"),
        ("expert_gating_func", 4, r"expert_gating_func is 4; supported: 1"),
        ("expert_weights_scale", -2.5, r"expert_weights_scale is -2\.5; a number above 0"),
        ("expert_group_count", 3, r"1 of 3 groups of 8 experts are used; groups must be of one size"),
        ("expert_count", None, r"qwen3moe\.expert_count is missing"),
        (
            "expert_feed_forward_length",
            128,
            r"tensor blk\.0\.ffn_gate_exps\.weight has shape \(8, 256, 256\)",
        ),
    ],
)
def test_what_the_metadata_says_wrong_is_named(key, value, says):
    checkpoint = open_checkpoint(TINY)
    metadata = dict(checkpoint.metadata) | {f"qwen3moe.{key}": value}
    with pytest.raises((CheckpointError, NotImplementedError), match=says):
        load_arrays(dataclasses.replace(checkpoint, metadata=metadata))


def load_arrays(checkpoint):
    run = bj.RunConfig(impl="reference", weights="packed", batch_size=1)
    return network_params.load(load_plans.plan(architectures.describe(checkpoint), run))


HUGGING_FACE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip


def folder(dense: int | None = None, **changes) -> Checkpoint:
    """The tiny model as transformers writes it; layer `dense` has the feed-forward of its expert 1 alone."""
    tensors = {}

    def put(name, w):
        tensors[name] = Tensor(name, "f32", w.shape, np.ascontiguousarray(w).view(np.uint8))

    for name, w in arrays().items():
        layer, short = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name).groups()
        ours = (f"model.layers.{layer}." if layer else "") + HUGGING_FACE[short] + ".weight"
        if "{}" in ours and int(layer) == dense:
            put(ours.replace("experts.{}.", ""), w[1])
        elif "{}" in ours:
            for e, of_expert in enumerate(w):
                put(ours.format(e), of_expert)
        elif short != "ffn_gate_inp" or int(layer) != dense:
            put(ours, w)
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
        "rms_norm_eps": open_checkpoint(TINY).metadata["qwen3moe.attention.layer_norm_rms_epsilon"],
        "rope_theta": 1e6, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256,
        "norm_topk_prob": True, "mlp_only_layers": [] if dense is None else [dense],
    }  # fmt: skip
    return Checkpoint("folder", "huggingface", config | changes, tensors)


def test_a_hugging_face_folder_is_the_same_model():
    """A layer's experts lie there one by one."""
    params, config = load_arrays(folder()), architectures.config_of(folder())
    assert [layer.channels for layer in config.layers] == [layer.channels for layer in tiny().config.layers]
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(tiny().params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    missing = folder()
    del missing.tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.5\.up_proj\.weight is missing"):
        load_arrays(missing)
    assert not architectures.config_of(folder(norm_topk_prob=False)).experts.normalized


def test_layers_without_experts_among_those_that_have_them():
    """Layer 1 has one feed-forward: as if all its tokens went to the expert that it is, whatever the
    router."""
    config = architectures.config_of(folder(1))
    assert [layer.channels.kind for layer in config.layers] == ["experts", "mlp", "experts"]
    assert architectures.config_of(folder(1, decoder_sparse_step=2)).layers_with("experts") == ()
    assert architectures.config_of(folder(decoder_sparse_step=2)).layers_with("experts") == (1,)

    def all_to_one(site, layer, x):
        only = jnp.zeros_like(x).at[..., 1].set(1.0)
        return jnp.where(layer == 1, only, x)

    prompt, lengths = np.array([ids(20)]), jnp.array([20])
    taps = bj.Taps(edit=all_to_one, at={"router"})
    run = functools.partial(bj.forward, tokens=prompt, lengths=lengths)
    want, _ = jax.jit(functools.partial(run, config=tiny().config, taps=taps))(tiny().params)
    got, _ = jax.jit(functools.partial(run, config=config))(load_arrays(folder(1)))
    np.testing.assert_allclose(got, want, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"mlp_only_layers is 'x'; a list of layers"):
        architectures.config_of(folder(mlp_only_layers="x"))
