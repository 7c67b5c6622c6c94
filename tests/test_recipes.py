"""Every recipe of docs/recipes runs, is short, stands on public functions, and does what it says."""

import ast
import runpy
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj

FOLDER = Path(__file__).parent.parent / "docs" / "recipes"
RECIPES = sorted(FOLDER.glob("*.py"))
GREEDY = bj.SamplingParams(temperature=0.0)


def log_p(model, ids):
    """Of each token of a text but its first, float64."""
    scores = bj.logits(model, ids)[:-1].astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    return scores[np.arange(len(ids) - 1), ids[1:]]


def beam_search(r):
    """Scores are those of the whole texts, and the best is no worse than greedy."""
    ids, new = r["ids"], r["NEW"]
    for score, beam in zip(r["scores"], r["beams"].tolist(), strict=True):
        assert abs(log_p(r["model"], [*ids, *beam])[-new:].sum() - score) < 1e-3
    greedy = list(ids)
    for _ in range(new):
        greedy.append(int(bj.logits(r["model"], greedy)[-1].argmax()))
    assert r["scores"].max() >= log_p(r["model"], greedy)[-new:].sum() - 1e-3


def classifier_free_guidance(r):
    """By teacher-forced logits of both texts."""
    model = r["model"]
    steered, plain = (model.tokenizer.encode(prompt) for prompt in r["prompts"])
    tokens: list[int] = []
    for token in r["answer"]:
        a, b = (bj.logits(model, [*ids, *tokens])[-1] for ids in (steered, plain))
        assert token == (b + r["SCALE"] * (a - b)).argmax()
        tokens.append(token)


def dynamic_ban(r):
    assert len(r["output"].tokens) == 16 and r["digits"].sum() >= 10  # the recipe itself asserts the rest


def best_of_n(r):
    best = r["outputs"][r["best"]]
    ids = r["model"].tokenizer.encode("The best name for a cat is")
    mean = log_p(r["model"], [*ids, *best.tokens])[-len(best.tokens) :].mean()
    assert abs(mean - max(r["by_token"])) < 1e-3 and len({tuple(o.tokens) for o in r["outputs"]}) > 8


def speculative_decoding(r):
    """The target's own greedy text, whatever the draft says."""
    prompt = r["models"][0].tokenizer.encode("Once upon a time")
    written = r["text"][len(prompt) :]
    said = bj.logits(r["models"][0], r["text"])[len(prompt) - 1 : -1].argmax(-1)
    assert len(written) >= 24 and written == said.tolist()


def soft_prompt(r):
    first, _ = r["improve"](bj.embed(r["model"].params, jnp.arange(4)), r["model"].params)
    assert r["value"] < 0.1 < first
    said = bj.generate(r["model"], r["soft"], max_new_tokens=8, sampling=GREEDY)[0].tokens
    assert sum(a == b for a, b in zip(said, r["ids"].tolist(), strict=False)) >= 6


def activation_patching(r):
    """Behind the last layer nothing of the other text is left."""
    last = r["patched"](r["model"].params, r["model"].config.num_layers - 1)
    assert abs(last - r["logits"][0, -1, r["answer"]]) < 1e-3


def attention_maps(r):
    np.testing.assert_allclose(r["maps"].sum(-1), 1, atol=1e-5)
    n = len(r["ids"])
    assert not np.triu(r["maps"][0, 0, :n, :n], 1).any()


def adapter(r):
    start = {"a": r["a"], "b": jnp.zeros_like(r["adapter"]["b"])}
    assert r["value"] < 0.2 * r["step"](start, r["model"].params)[0]


def shared_prefix(r):
    """Each row goes on as if it had read prefix and question itself."""
    whole = [[*r["prefix"], *question] for question in r["questions"]]
    sampling = bj.SamplingParams(seed=0)  # the next row's is 1
    alone = bj.generate(r["model"], whole, sampling=sampling, max_new_tokens=r["new"], ignore_eos=True)
    for drawn, output in zip(r["drawn"].tokens.tolist(), alone, strict=True):
        got = [t for t in drawn if t >= 0]
        assert got[: len(output.tokens)] == output.tokens[: len(got)]


def export(r):
    got = r["again"].call(r["model"].params, r["ids"], r["lengths"])
    n = int(r["lengths"][0])
    np.testing.assert_allclose(got[0, :n], bj.logits(r["model"], r["ids"][0, :n].tolist()), atol=1e-3)


def a_thousand_seeds(r):
    """As often as the model's own probabilities say."""
    p = jax.nn.softmax(bj.logits(r["model"], r["ids"])[-1])
    likeliest = int(p.argmax())
    share = (r["answers"][:, 0] == likeliest).mean()
    assert abs(share - p[likeliest]) < 4 * (p[likeliest] * (1 - p[likeliest]) / 1000) ** 0.5
    assert len({tuple(row) for row in r["answers"].tolist()}) > 100


def direct_logit_attribution(r):
    """Shares add up to the logit, and each is the part's product with the token's output vector, as the norm
    scales it."""
    model, c = r["model"], r["c"]
    assert abs(r["shares"].sum() - r["logits"][r["answer"]]) < 0.02 * jnp.abs(r["shares"]).max()
    head = model.params.embed if model.params.head is None else model.params.head
    gamma, row = (np.asarray(x, np.float64) for x in (model.params.final_norm, head.rows(r["answer"])))
    stream, parts = (np.asarray(x, np.float64) for x in (r["stream"][0, -1], r["parts"]))
    want = parts @ (row * gamma) / np.sqrt((stream**2).mean() + c.rms_norm_eps)
    np.testing.assert_allclose(r["shares"], want, atol=0.02 * np.abs(want).max())
    np.testing.assert_allclose(parts.sum(0), stream, atol=1e-4)


def sparse_autoencoder(r):
    assert len(r["values"]) == 8 * 4 and r["values"][-1] < 0.5 * r["values"][0]


def grpo(r):
    """Rewards go up. Before the weights change, training has the very probabilities of the rollout."""
    assert np.mean(r["rewards"][:2]) < 0.65 and np.mean(r["rewards"][-2:]) > 0.85
    first, second = r["ratios"][::2], r["ratios"][1::2]
    assert (np.array(first) == 1).all() and not (np.array(second) == 1).all()


def lm_eval_harness(r):
    """Three kinds of requests, by teacher-forced logits and by generate."""

    class Request:
        def __init__(self, *args):
            self.args = args

    lm, model, encode = r["BonsaiLM"](), r["model"], r["encode"]
    pairs = [("A bonsai", " is small"), ("A bonsai", " is a tree"), ("", "A bonsai")]
    for (context, end), (value, greedy) in zip(
        pairs, lm.loglikelihood([Request(*p) for p in pairs]), strict=True
    ):
        ids = encode(context) if context else r["start"]
        ends = encode(context + end)[len(ids) :] if context else encode(end, add_special=False)
        assert abs(log_p(model, [*ids, *ends])[len(ids) - 1 :].sum() - value) < 0.3
        said = [int(bj.logits(model, [*ids, *ends[:n]])[-1].argmax()) for n in range(len(ends))]
        assert greedy == (said == ends)
    ids = [*r["start"], *encode("A bonsai is a small tree in a pot.", add_special=False)]
    for most in (len(ids), 9):  # the second in windows, each of them full
        want = log_p(model, ids[:most]).sum()
        for at in range(most, len(ids), most - 1):
            end = min(at + most - 1, len(ids))
            want += log_p(model, ids[end - most : end])[at - end :].sum()
        assert abs(lm.rolling(ids, most) - want) < 0.3
    (rolling,) = lm.loglikelihood_rolling([Request("A bonsai is a small tree in a pot.")])
    assert abs(rolling - log_p(model, ids).sum()) < 0.3
    how = {"until": ["zz"], "max_gen_toks": 5, "temperature": 0.0, "do_sample": False}
    (output,) = bj.generate(model, "A bonsai", sampling=GREEDY, max_new_tokens=5)
    assert lm.generate_until([Request("A bonsai", how)]) == [output.text]


@pytest.fixture(autouse=True)
def harness(monkeypatch):
    """All that a recipe takes from lm-eval, which is not installed for tests: a class to inherit from."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = object


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_does_what_it_says(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # two of them write a file
    globals()[recipe.stem](runpy.run_path(str(recipe)))


LONG = {"grpo": 60}  # lines, of those that need more than 30


def test_there_are_sixteen_short_ones_on_public_functions():
    index = (FOLDER / "README.md").read_text()
    assert len(RECIPES) == 16
    for recipe in RECIPES:
        source = recipe.read_text()
        assert len(source.splitlines()) <= LONG.get(recipe.stem, 30) and f"({recipe.name})" in index, recipe
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not any(name.startswith(("bonsai_jax.", "pallas_kernels")) for name in names), recipe
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "bj":
                assert node.attr in bj.__all__, recipe
