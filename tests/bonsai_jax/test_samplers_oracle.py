"""The samplers before the draw against llama.cpp: the probabilities from which its server draws, by setting.

All settings are rows of one batch, with the logits of one prompt. A bias on each token spreads the tiny
model's logits like those of a real one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import chain, sampling, truncations
from bonsai_jax.sampling_params import SamplingParams
from tests.bonsai_jax.llama_cpp import LlamaCpp
from tests.bonsai_jax.test_oracle import as_file

VOCAB = 512
BIAS = {i: float(b) for i, b in enumerate(np.random.default_rng(0).normal(0, 2, VOCAB))}
# Parts of characters: llama.cpp's server keeps them back, with their probabilities, when an answer ends.
PARTS = dict.fromkeys(range(94, 256), -15.0)
BIAS |= PARTS
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPT = [306, *range(40, 52)]
# "cd" and then "e" or "\n"; "xyz" twice; "ab" thrice. Tokens below 256 are bytes in GPT-2's order.
REPEATS = "abcde\nxyz: xyz; abcd abcdefg\nhello xyz! ab"
# llama.cpp's order of samplers for our `temperature_first`.
FIRST = ["penalties", "dry", "top_n_sigma", "temperature", "top_k", "typ_p", "top_p", "min_p", "xtc"]

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the defaults": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "typical": {"typical_p": 0.5},
    "much that is typical": {"typical_p": 0.95, "temperature": 0.7},
    "little that is typical": {"typical_p": 0.01},
    "sigma 1": {"top_n_sigma": 1.0, "temperature": 1.5},
    "sigma 2": {"top_n_sigma": 2.0},
    "sigma off": {"top_n_sigma": -1.0, "typical_p": 0.9},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.04},
    "xtc of few": {"xtc_probability": 1.0, "xtc_threshold": 0.1, "top_k": 5},
    "xtc off": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "dynamic": {"dynatemp_range": 0.5, "temperature": 1.0},
    "dynamic, squared": {"dynatemp_range": 2.0, "dynatemp_exponent": 2.0, "temperature": 0.5},
    "dynamic, few": {"dynatemp_range": 0.5, "top_k": 4},
    "dynamic, sigma": {"dynatemp_range": 0.9, "top_n_sigma": 1.0, "temperature": 1.2},
    "dynamic, one": {"dynatemp_range": 0.9, "top_k": 1},
    "dynamic, from 0": {"dynatemp_range": 0.7, "temperature": 0.0, "top_k": 8},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "temperature": 0.9},
    "mirostat of few": {"mirostat": 2, "mirostat_tau": 1.0, "top_k": 2, "typical_p": 0.1},
    "mirostat of one": {"mirostat": 2, "mirostat_tau": 0.1, "repetition_penalty": 1.5},
    "all": {
        **{"typical_p": 0.9, "top_n_sigma": 2.5, "xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 60},
        **{"top_p": 0.97, "min_p": 0.02, "dynatemp_range": 0.4, "temperature": 0.9},
    },
    "heat first": {"temperature": 2.0, "temperature_first": True, "typical_p": 0.6, "top_p": 0.9},
    "dynamic first": {"dynatemp_range": 0.9, "temperature_first": True, "min_p": 0.1, "top_n_sigma": 2.0},
    "cold": {"temperature": 0.0, "xtc_probability": 1.0, "xtc_threshold": 0.05},
}
DRY = {"dry_multiplier": 0.8, "dry_base": 1.75}
REPETITIONS: dict[str, dict[str, Any]] = {
    "dry": DRY,
    "dry of one": DRY | {"dry_allowed_length": 1},
    "dry of any": DRY | {"dry_allowed_length": 0, "dry_multiplier": 0.1},
    "dry of long ones": DRY | {"dry_allowed_length": 3},
    "dry without breakers": DRY | {"dry_sequence_breakers": ()},
    "dry in few tokens": DRY | {"dry_penalty_last_n": 20},
    "dry in too few": DRY | {"dry_penalty_last_n": 2},
    "dry with a text": DRY | {"dry_sequence_breakers": ("yz! ",), "dry_allowed_length": 1},
    "dry with texts": DRY | {"dry_sequence_breakers": ("hello", "z!", "z! a"), "dry_allowed_length": 1},
    "dry, large": DRY | {"dry_base": 1e6, "dry_multiplier": 5.0, "dry_allowed_length": 1},
    "dry and a penalty": DRY | {"repetition_penalty": 1.2, "typical_p": 0.9},
}
WITHOUT_EFFECT = ("dry in too few", "dry of long ones")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    path = as_file("synth:tiny-llama:f32", tmp_path_factory.mktemp("oracle") / "tiny.gguf")
    return bj.load(str(path)), LlamaCpp(path, 256)


def asked(params: SamplingParams) -> dict[str, Any]:
    """A request to llama.cpp's server."""
    fields = dataclasses.asdict(params)
    own = {name: fields[name] for name in fields if name.split("_")[0] not in ("logit", "seed", "min")}
    own |= {"min_p": params.min_p, "repeat_penalty": params.repetition_penalty, "repeat_last_n": 64}
    own["dry_penalty_last_n"] = 64 if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
    own["dry_sequence_breakers"] = list(params.dry_sequence_breakers)
    if not params.dry_sequence_breakers:  # it refuses an empty list
        own["dry_sequence_breakers"] = ["\u2603"]
    if params.temperature_first:
        own["samplers"] = FIRST
    return own | {
        "logit_bias": [[i, b] for i, b in params.logit_bias.items()],
        "cache_prompt": True,
        "seed": 1,
    }


def drawn(oracle: LlamaCpp, prompt: list[int], params: SamplingParams, n: int = 1) -> list[Any]:
    """llama.cpp's n tokens: their ids, and the probabilities [V] from which each was drawn."""
    request = {"prompt": prompt, "max_tokens": n, "logprobs": VOCAB, "post_sampling_probs": True}
    reply = oracle.server.handle_completions(request | asked(params))
    assert "choices" in reply, reply
    (choice,) = reply["choices"]
    each = []
    for token in choice["logprobs"]["content"]:
        p = np.zeros(VOCAB)
        for one in token["top_probs"]:
            p[one["id"]] = one["prob"]
        each.append((token["id"], p))
    return each


@functools.partial(jax.jit, static_argnames="rows")
def left(own, s, logits, length, rows):
    repeated = jnp.broadcast_to(logits, (rows, VOCAB))
    lengths, stops = jnp.full(rows, length), jnp.full((rows, 1), -1)
    keys = jax.random.key_data(s.keys)[:, :2]
    x, temperature = chain.remaining(own, sampling.rules(s), repeated, lengths, stops, keys)
    return jax.nn.softmax(truncations.heated(x, temperature))


def probabilities(model, prompt: list[int], each: list[SamplingParams], **changed: Any) -> np.ndarray:
    """[rows, V], from which rows with these settings draw after a prompt."""
    rows, s = len(each), sampling.sampler(each, len(each), VOCAB)
    state = bj.new_state(model, rows, 64, each, 1)
    valid = np.arange(64)[None] < np.full((rows, 1), len(prompt))
    tokens = np.tile(np.pad(prompt, (0, 64 - len(prompt))), (rows, 1))
    s = sampling.read_prompt(s, tokens, valid)
    own = chain.note(state.chain, tokens, np.zeros(rows, np.int32), valid).replace(**changed)
    return np.asarray(left(own, s, bj.logits(model, prompt)[-1], len(prompt), rows))


def compare(name: str, got: np.ndarray, want: np.ndarray) -> None:
    assert set(np.flatnonzero(got)) == set(np.flatnonzero(want)), name
    np.testing.assert_allclose(got, want, atol=3e-6, err_msg=name)


def test_every_sampler_leaves_llama_cpp_s_probabilities(both):
    model, oracle = both
    each = [SamplingParams(**OFF | change, logit_bias=BIAS) for change in SETTINGS.values()]
    got = probabilities(model, PROMPT, each)
    for name, params, own in zip(SETTINGS, each, got, strict=True):
        ((_, want),) = drawn(oracle, PROMPT, params)
        compare(name, own, want)


def test_dry_leaves_llama_cpp_s_probabilities(both):
    """llama.cpp adds biases before penalties, and we after them: the row with both has none on what
    is repeated."""
    model, oracle = both
    prompt = model.tokenizer.encode(REPEATS)
    bias = BIAS | dict.fromkeys(range(64, 92), 6.0)  # so that a penalty shows
    each = [SamplingParams(**OFF, logit_bias=bias)]
    for change in REPETITIONS.values():
        own = PARTS if "repetition_penalty" in change else bias
        each.append(SamplingParams(**OFF | change, logit_bias=own))
    plain, *got = probabilities(model, prompt, each)
    for name, params, own in zip(REPETITIONS, each[1:], got, strict=True):
        ((_, want),) = drawn(oracle, prompt, params)
        compare(name, own, want)
        assert (np.abs(own - plain).max() > 1e-5) == (name not in WITHOUT_EFFECT), name


def test_mirostat_s_limit_follows_llama_cpp_s_tokens(both):
    model, oracle = both
    params = SamplingParams(**OFF | SETTINGS["mirostat"], logit_bias=BIAS)
    prompt, mu = list(PROMPT), 2 * params.mirostat_tau
    for token, want in drawn(oracle, PROMPT, params, 6):
        (got,) = probabilities(model, prompt, [params], mu=jnp.float32([mu]))
        compare(f"after {prompt[len(PROMPT) :]}", got, want)
        mu -= params.mirostat_eta * (-np.log2(want[token]) - params.mirostat_tau)
        prompt.append(token)
