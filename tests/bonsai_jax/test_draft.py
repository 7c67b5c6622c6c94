"""The draft layer (MTP): what it foresees is numpy's, and the text is plain decoding's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted, steps
from bonsai_jax.decoding.proposers import mtp
from bonsai_jax.network import architectures, draft
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights import specs
from bonsai_jax.weights.read import blocks, read
from checkpoints import Checkpoint, Tensor, open_checkpoint
from tests.bonsai_jax.test_speculation import HYBRID, two_layers
from tests.bonsai_jax.tokens import assert_same

RUN = bj.RunConfig(page_size=16, impl="reference", draft=True)
RNG = np.random.default_rng(2)
IDS = [RNG.integers(0, 256, n).tolist() for n in (21, 6)]
GREEDY, HOT = bj.SamplingParams(temperature=0.0), bj.SamplingParams(temperature=1.0, seed=3)


TIME = mtp.time


@pytest.fixture(autouse=True)
def drafting_takes_little_time(monkeypatch):
    """As beside a large model; of these it is a third."""
    monkeypatch.setattr(mtp, "time", lambda params, config: 0.05)


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    """A delta net, a layer of attention, and a draft layer, in float32."""
    drawn = two_layers(open_checkpoint(HYBRID)).tensors
    found = {name: np.asarray(blocks(t)).view(np.float32).reshape(t.shape) for name, t in drawn.items()}
    rng = np.random.default_rng(7)
    for name, value in list(found.items()):
        if name.startswith("blk.1."):
            found[name.replace("blk.1.", "blk.2.")] = rng.permutation(value.ravel()).reshape(value.shape)
    wide = found["output.weight"].shape[1]
    found["blk.2.nextn.eh_proj.weight"] = rng.normal(size=(wide, 2 * wide)).astype(np.float32) / 20
    for name in ("enorm", "hnorm", "shared_head_norm"):
        found[f"blk.2.nextn.{name}.weight"] = rng.normal(1, 0.2, wide).astype(np.float32)
    return found


def checkpoint(tensors: dict[str, np.ndarray]) -> Checkpoint:
    found = two_layers(open_checkpoint(HYBRID))
    raw = {name: np.ascontiguousarray(a, np.float32) for name, a in tensors.items()}
    made = {
        name: Tensor(name, "f32", a.shape, a.view(np.uint8).reshape(*a.shape[:-1], -1))
        for name, a in raw.items()
    }
    more = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    return dataclasses.replace(found, tensors=made, metadata=dict(found.metadata) | more)


@functools.cache
def tiny() -> bj.Model:
    return bj.from_checkpoint(checkpoint(arrays()), RUN)


@functools.cache
def sure() -> bj.Model:
    """Layers that add nothing: a token decides which one follows, and the draft layer knows it."""
    tensors = dict(arrays())
    for name, a in tensors.items():
        if name.endswith(("ssm_out.weight", "attn_output.weight", "ffn_down.weight")):
            tensors[name] = np.zeros_like(a)
    wide = len(tensors["output_norm.weight"])
    tensors["blk.2.nextn.eh_proj.weight"] = np.eye(wide, 2 * wide)
    tensors["blk.2.nextn.enorm.weight"] = np.ones(wide)
    tensors["blk.2.nextn.shared_head_norm.weight"] = tensors["output_norm.weight"]
    return bj.from_checkpoint(checkpoint(tensors), RUN)


def decoded(model: bj.Model, speculate: str | None, size: int = 14):
    tokens = np.zeros((2, 32), np.int32)
    for row, of in zip(tokens, IDS, strict=True):
        row[: len(of)] = of
    state = bj.new_state(model, 2, 48, [GREEDY, HOT], size, ignore_eos=True, speculate=speculate)
    lengths = jnp.array([len(of) for of in IDS])
    return jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=size)


def in_float64(hidden: np.ndarray, tokens: list[int], ahead: int) -> tuple[list[int], float]:
    """What the draft layer foresees behind the last of these tokens; hidden is what the model made of those
    before it. And the least distance between the likeliest token and the next, in logits."""
    w = {name: a.astype(np.float64) for name, a in arrays().items()}
    m = {key.removeprefix("qwen35."): v for key, v in open_checkpoint(HYBRID).metadata.items()}
    eps, heads, kv_heads = m["attention.layer_norm_rms_epsilon"], m["attention.head_count"], 2
    half = m["rope.dimension_count"] // 2
    theta = m["rope.freq_base"] ** (-np.arange(half) / half)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[name]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def turn(x, place):
        z = (x[:, :half] + 1j * x[:, half : 2 * half]) * np.exp(1j * place * theta)
        return np.concatenate([z.real, z.imag, x[:, 2 * half :]], axis=1)

    keys, values, found, margin = [], [], [], np.inf
    h = [norm(x, "output_norm.weight") for x in hidden]
    tokens, b = list(tokens[1:]), "blk.2."
    for place in range(len(hidden) + ahead - 1):
        joined = [
            norm(w["token_embd.weight"][tokens[place]], b + "nextn.enorm.weight"),
            norm(h[place], b + "nextn.hnorm.weight"),
        ]
        x = w[b + "nextn.eh_proj.weight"] @ np.concatenate(joined)
        n = norm(x, b + "attn_norm.weight")
        of_head = (w[b + "attn_q.weight"] @ n).reshape(heads, 2, -1)
        q = turn(norm(of_head[:, 0], b + "attn_q_norm.weight"), place)
        k = norm((w[b + "attn_k.weight"] @ n).reshape(kv_heads, -1), b + "attn_k_norm.weight")
        keys.append(turn(k, place))
        values.append((w[b + "attn_v.weight"] @ n).reshape(kv_heads, -1))
        y = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            s = np.stack(keys)[:, kv] @ q[head] / np.sqrt(q.shape[1])
            p = np.exp(s - s.max())
            y.append(p @ np.stack(values)[:, kv] / p.sum() * sigmoid(of_head[head, 1]))
        x = x + w[b + "attn_output.weight"] @ np.concatenate(y)
        n = norm(x, b + "post_attention_norm.weight")
        gate = w[b + "ffn_gate.weight"] @ n
        x = x + w[b + "ffn_down.weight"] @ (gate * sigmoid(gate) * (w[b + "ffn_up.weight"] @ n))
        if place >= len(hidden) - 1:
            h.append(norm(x, b + "nextn.shared_head_norm.weight"))
            logits = w["output.weight"] @ h[-1]
            tokens.append(int(logits.argmax()))
            found.append(tokens[-1])
            margin = min(margin, float(np.diff(np.sort(logits)[-2:])[0]))
    return found, margin


def test_tokens_of_a_step_are_rows_where_kernels_have_one_token_each(monkeypatch):
    """Here by the reference: keys and values are those of tokens that are read one by one, in a row behind
    some, in one that begins, with fewer tokens, and without any."""
    model, rng = tiny(), np.random.default_rng(0)
    state = bj.new_state(model, 4, 48, GREEDY, 4, speculate="mtp")
    own, cache = state.speculation.draft, state.cache
    hidden = jnp.asarray(rng.standard_normal((4, 4, model.config.hidden)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 256, (4, 4)), jnp.int32)
    own = own.replace(hidden=hidden[:, ::-1].sum(1))
    first, counts = np.array([[19], [0], [7], [3]]), np.array([[4], [4], [2], [0]])
    positions = jnp.asarray(np.where(np.arange(4) < counts, first + np.arange(4), -1), jnp.int32)

    def follow(own, *read):
        return jax.jit(lambda own, *read: followed(own, *read))(own, *read)

    def followed(own, hidden, tokens, positions):
        return draft.follow(
            model.params, model.params.draft, own, cache, hidden, tokens, positions, model.config
        )[1]

    want = own
    for i in range(4):
        want = follow(want, *(a[:, i : i + 1] for a in (hidden, tokens, positions)))
    got = follow(own, hidden, tokens, positions)
    monkeypatch.setattr(draft, "_together", lambda state, tokens: tokens)
    for each in (got, follow(own, hidden, tokens, positions)):
        assert float(jnp.abs(each.attention.k).max()) > 0.1
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), each, want)


def test_it_foresees_what_numpy_does():
    """Behind a prompt and steps that took some of its proposals back, in rows of different lengths."""
    model = tiny()
    state, drawn, _ = decoded(model, "mtp")
    state = state.replace(remaining=jnp.array([1, 1]))
    got, _ = jax.jit(functools.partial(draft.foresee, count=3, config=model.config))(
        model.params,
        model.params.draft,
        state.speculation.draft,
        state.cache,
        state.tokens,
        state.remaining > 0,
    )
    texts = [[*prompt, *answer] for prompt, answer in zip(IDS, np.asarray(drawn).tolist(), strict=True)]
    tokens, lengths = np.zeros((2, max(map(len, texts))), np.int32), np.array([*map(len, texts)])
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    _, kept = bj.jitted.forward(model.params, tokens, lengths, model.config, taps=bj.Taps("output"))
    for text, foreseen, hidden in zip(texts, got.tolist(), np.asarray(kept["output"][-1]), strict=True):
        want, margin = in_float64(hidden[: len(text) - 1], text, 3)
        assert margin > 1e-3 and foreseen == want


def test_text_is_plain_decoding_s_whatever_it_foresees():
    plain, speculated = decoded(tiny(), None), decoded(tiny(), "mtp")
    assert_same(np.asarray(speculated.tokens), np.asarray(plain.tokens))
    how = {"max_new_tokens": 14, "ignore_eos": True, "speculate": "mtp"}
    outputs = bj.generate(tiny(), IDS, sampling=[GREEDY, HOT], **how)  # in rows of an engine
    assert_same([output.tokens for output in outputs], np.asarray(plain.tokens).tolist())


def test_a_step_keeps_what_it_foresaw():
    """Two rows read four tokens a step; of 13 behind the first the greedy row needs four steps."""
    plain, (state, drawn, _) = decoded(sure(), None), decoded(sure(), "mtp")
    assert_same(np.asarray(drawn), np.asarray(plain.tokens))
    assert state.speculation.steps[0] == 4
    assert state.cache.lengths.tolist() == plain.state.cache.lengths.tolist()


@pytest.mark.parametrize("size", [7, 14])  # one look, and two
def test_a_layer_that_nobody_trusts_reads_the_tokens_of_plain_steps_together(size, monkeypatch):
    """What it stores is what it stores token by token, and it is trusted by what it would have proposed."""
    monkeypatch.setattr(mtp, "TRUST", 0.0)
    model, tokens = tiny(), np.zeros((2, 32), np.int32)
    state = decoded(model, "mtp", size).state
    assert state.speculation.steps.tolist() == [size - 1] * 2

    for row, of in zip(tokens, IDS, strict=True):
        row[: len(of)] = of
    want = bj.new_state(model, 2, 48, [GREEDY, HOT], size, ignore_eos=True, speculate="mtp")
    want, *_ = jitted.prefill(model.params, want, tokens, np.array([*map(len, IDS)]), model.config)
    foresee = jax.jit(functools.partial(draft.foresee, count=1, config=model.config))
    step, right = jax.jit(functools.partial(steps.step, config=model.config)), []
    for _ in range(size - 1):
        running = want.remaining > 0
        own = want.speculation.draft
        (guess, _) = foresee(model.params, model.params.draft, own, want.cache, want.tokens, running)
        want, new, _ = step(model.params, want)
        right.append(np.asarray(guess[:, 0] == new))
    trust = np.zeros(2)
    for one in right:
        trust = trust + (one - trust) / mtp.MEMORY
    np.testing.assert_allclose(state.speculation.trust, trust, atol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5),
        state.speculation.draft,
        want.speculation.draft,
    )


def test_drafting_takes_the_time_of_a_layer_and_the_output_matrix():
    params, config = tiny().params, tiny().config
    own = [*jax.tree.leaves(params.draft), *jax.tree.leaves(params.head)]
    every = [leaf for leaf in jax.tree.leaves(params) if leaf is not params.embed.fields["w"]]
    want = sum(leaf.nbytes for leaf in own) / sum(leaf.nbytes for leaf in every)
    assert TIME(params, config) == pytest.approx(want)


def test_a_layer_that_takes_too_long_neither_proposes_nor_reads(monkeypatch):
    monkeypatch.setattr(mtp, "time", lambda params, config: 0.9)
    plain, (state, drawn, _) = decoded(sure(), None, 12), decoded(sure(), "mtp", 12)
    assert_same(np.asarray(drawn), np.asarray(plain.tokens))
    assert state.speculation.steps.tolist() == [11, 11]
    assert not np.asarray(state.speculation.draft.attention.k).any()


def test_trust_comes_back_with_right_guesses(monkeypatch):
    """Of a layer that is always right and that nobody trusts: after eight plain steps it proposes."""
    monkeypatch.setattr(mtp, "TRUST", 0.0)
    monkeypatch.setattr(mtp, "MEMORY", 8)
    plain, (state, drawn, _) = decoded(sure(), None, 24), decoded(sure(), "mtp", 24)
    assert_same(np.asarray(drawn), np.asarray(plain.tokens))
    assert state.speculation.steps[0] == 8 + 4  # 15 of 23 tokens are left, four to a step


def test_from_a_hugging_face_folder_it_is_the_same():
    """With norms less 1, under the names of such folders."""
    file = checkpoint(arrays())
    in_file, draft_specs = architectures.describe(file, draft=True), architectures.get("qwen35").DRAFT
    names = {
        spec.gguf.format(0).replace("blk.0.", "blk.2.", 1): spec.huggingface.format(0) for spec in draft_specs
    }
    folder = {}
    for name, t in file.tensors.items():
        if name in names:  # norms less 1
            a = arrays()[name] - ("norm" in name)
            raw = np.ascontiguousarray(a, np.float32).view(np.uint8).reshape(*a.shape[:-1], -1)
            folder[names[name]] = dataclasses.replace(t, name=names[name], data=raw)
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"} <= folder.keys()
    other = Checkpoint("folder", "huggingface", {}, folder)
    config = dataclasses.replace(in_file.config, draft=None, skipped=("mtp.",))
    in_folder = specs.describe(other, (), specs.with_draft(other, config), draft_specs)
    run = load_plans.resolve(in_file, RUN)
    (ours,), (theirs,) = (read(load_plans.planned(one.draft, run)) for one in (in_file, in_folder))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), ours, theirs)


def test_it_is_asked_for_and_must_be_there():
    plainly = bj.from_checkpoint(checkpoint(arrays()), dataclasses.replace(RUN, draft=False))
    with pytest.raises(ValueError, match=r"'mtp' needs the draft layer; .* RunConfig\(draft=True\)"):
        bj.new_state(plainly, 1, 32, GREEDY, 4, speculate="mtp")
    with pytest.raises(ValueError, match=r"tiny-llama:q8_0: it has no draft layer \(MTP\); leave"):
        bj.load("synth:tiny-llama:q8_0", RUN)


@pytest.mark.slow
def test_a_draft_layer_with_experts():
    """A model of one expert in each layer is the dense model, so its draft layer foresees the same."""
    tensors, wide = {}, arrays()["output_norm.weight"].shape[0]
    for name, a in arrays().items():
        block, _, field = name.partition(".ffn_")
        tensors[name.replace(".weight", "_exps.weight") if field else name] = a[None] if field else a
        if field == "up.weight":
            tensors[f"{block}.ffn_gate_inp.weight"] = np.ones((1, wide))
            tensors[f"{block}.ffn_gate_inp_shexp.weight"] = np.ones(wide)
            tensors |= {f"{block}.ffn_{one}_shexp.weight": np.zeros((32, wide)) for one in ("gate", "up")}
            tensors[f"{block}.ffn_down_shexp.weight"] = np.zeros((wide, 32))
    file = checkpoint(tensors)
    keys = {"count": 1, "used_count": 1, "feed_forward_length": 512, "shared_feed_forward_length": 32}
    metadata = {key.replace("qwen35.", "qwen35moe."): value for key, value in file.metadata.items()}
    metadata |= {f"qwen35moe.expert_{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = "qwen35moe"
    model = bj.from_checkpoint(dataclasses.replace(file, metadata=metadata), RUN)
    assert model.config.layers[-1].channels.kind == "experts" and "experts" in model.params.draft.layers
    (state, drawn, _), dense = decoded(model, "mtp"), decoded(tiny(), "mtp")
    assert_same(np.asarray(drawn), np.asarray(dense.tokens))
    np.testing.assert_array_equal(state.speculation.steps, dense.state.speculation.steps)
