"""Wrong arguments of every public function end at once, in an error with the argument's name."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj

NAN, INF = float("nan"), float("inf")
LONG = 10**5000  # which Python refuses to write
FUNCTIONS = [len, type]
TEXTS = ["3", "", "nan", np.str_("3")]
NO_ARRAYS = [b"3", [], [3], (), {3: 3}, {3}, object(), 3j, bj, range(3), slice(3), ..., np.datetime64("2026")]
OBJECTS = [*NO_ARRAYS, np.array([3, 4]), np.array([]), jnp.ones(2)]
NO_NUMBERS = [*OBJECTS, *TEXTS, *FUNCTIONS, {}]
NOT_WHOLE = [1.5, 3.0, np.float32(2), np.float64(1.5), jnp.float32(2), NAN, INF, -INF, np.float64(NAN)]
TRUTHS = [True, np.True_, jnp.array(True)]
HUGE = [10**12, 2**31, np.int64(2**40), np.uint64(2**63), LONG]
NEGATIVE = [-1, np.int64(-1), jnp.int32(-5), -(10**12), -LONG]
WRONG_INTEGERS = [*NO_NUMBERS, *NOT_WHOLE, *TRUTHS]
WRONG_COUNTS = [*WRONG_INTEGERS, *HUGE, *NEGATIVE]
FROM_1 = [*WRONG_COUNTS, 0]
WRONG_NUMBERS = [*NO_NUMBERS, *TRUTHS, NAN, np.float32(NAN), -1, -LONG, np.int8(-3), jnp.float32(-1)]
WRONG_PENALTIES = [*NO_NUMBERS, *TRUTHS, NAN, INF, -INF, 10**7, LONG]
WRONG_FLAGS = [*NO_NUMBERS, *NOT_WHOLE, *HUGE, *NEGATIVE, 2]
NO_TEXTS = [*OBJECTS, {}, *FUNCTIONS, *NOT_WHOLE, *TRUTHS, *HUGE, 0, -1]
NO_FUNCTIONS = [*OBJECTS, {}, *TEXTS, *NOT_WHOLE, *TRUTHS, 0, -1, LONG]
NOT_OURS = [*NO_FUNCTIONS, *FUNCTIONS]
NOT_A_MODEL = [*NOT_OURS, None, "demo"]
NO_TOKENS = [
    3,
    NAN,
    True,
    object(),
    {},
    {3: 3},
    b"3",
    None,
    [1.5],
    [None],
    [True],
    ["3"],
    [[NAN]],
    [LONG],
    [-1],
]
NO_TOKENS += [
    [[1, 2], [3]],
    [[[1]]],
    [],
    np.array(["3"]),
    np.array([[True]]),
    np.zeros((1, 2, 3)),
    np.zeros(0),
]


@functools.cache
def tiny() -> bj.Model:
    return bj.load("synth:tiny-llama:q8_0", bj.RunConfig(page_size=16))


@functools.cache
def engine() -> bj.Engine:
    return bj.Engine(tiny(), max_batch_size=2, context=64)


@functools.cache
def state() -> bj.State:
    return bj.new_state(tiny(), 1, 32, bj.SamplingParams(), 4)


def fill(function: Callable, arguments: dict[str, Callable[[], Any]]) -> Callable[..., Any]:
    """A call of the function with these arguments, one of which may be replaced."""

    def call(**wrong):
        return function(**{name: make() for name, make in arguments.items() if name not in wrong}, **wrong)

    return call


def const(value: Any) -> Callable[[], Any]:
    return lambda: value


ARRAYS = {"params": lambda: tiny().params, "config": lambda: tiny().config}
TOKENS = {"tokens": const([[1, 2]]), "lengths": const([2])}
STATE = {**ARRAYS, "state": state}
CACHE = {**ARRAYS, **TOKENS, "cache": lambda: state().cache}
CALLS = {
    "SamplingParams": fill(bj.SamplingParams, {}),
    "RunConfig": fill(bj.RunConfig, {}),
    "Taps": fill(bj.Taps, {}),
    "make_mesh": fill(bj.make_mesh, {}),
    "load": fill(bj.load, {"source": const("synth:tiny-llama:q8_0")}),
    "new_cache": fill(bj.new_cache, {"model": tiny, "batch_size": const(1), "context": const(8)}),
    "new_state": fill(
        bj.new_state,
        {
            "model": tiny,
            "batch_size": const(5),
            "context": const(8),
            "params": bj.SamplingParams,
            "max_new_tokens": const(4),
        },
    ),
    "json_schema": fill(bj.json_schema, {}),
    "regex": fill(bj.regex, {}),
    "grammar": fill(bj.grammar, {}),
    "choice": fill(bj.choice, {}),
    "generate": fill(bj.generate, {"model": tiny, "prompts": const("One")}),
    "stream": lambda **wrong: next(fill(bj.stream, {"model": tiny, "prompt": const("One")})(**wrong)),
    "logits": fill(bj.logits, {"model": tiny, "token_ids": const([1, 2])}),
    "iter_logits": lambda **wrong: list(
        fill(bj.iter_logits, {"model": tiny, "token_ids": const([1, 2])})(**wrong)
    ),
    "Engine": fill(bj.Engine, {"model": tiny}),
    "update_params": lambda **wrong: engine().update_params(**{"params": tiny().params} | wrong),
    "submit": lambda **wrong: engine().submit(**{"prompt": "One"} | wrong),
    "result": lambda **wrong: engine().submit("One", max_new_tokens=1).result(**wrong),
    "prefill": fill(bj.prefill, STATE | TOKENS),
    "step": fill(bj.step, STATE),
    "decode": fill(bj.decode, STATE | {"limit": const(1), "size": const(1)}),
    "generate_tokens": fill(bj.generate_tokens, STATE | TOKENS | {"size": const(1)}),
    "extend": fill(bj.extend, CACHE),
    "hidden_states": fill(bj.hidden_states, CACHE),
    "forward": fill(bj.forward, ARRAYS | TOKENS),
    "embed": fill(bj.embed, {"params": ARRAYS["params"], "tokens": const([1, 2])}),
    "save_state": fill(bj.save_state, {"path": const("state.safetensors"), "state": state}),
    "load_state": fill(bj.load_state, {"path": const("state.safetensors"), "model": tiny}),
    "encode": lambda **wrong: tiny().tokenizer.encode(**{"text": "One"} | wrong),
    "decode_ids": lambda **wrong: tiny().tokenizer.decode(**{"ids": [1, 2]} | wrong),
}
NO_STOPS = [
    3,
    NAN,
    True,
    b"One",
    [3],
    {3: 3},
    object(),
    len,
    [None],
    [NAN],
    [b"3"],
    "",
    ["One", ""],
    ["x", 3],
]
NO_SOURCES = [3, NAN, None, True, [3], {}, object(), len, np.array([3]), jnp.ones(2), 3j, LONG]
DRAWS = {"taps": NOT_OURS, "logits_processor": NO_FUNCTIONS, "logprobs": WRONG_COUNTS}
ANSWERS = {
    **DRAWS,
    "max_new_tokens": FROM_1,
    "sampling": NOT_OURS,
    "stop": NO_STOPS,
    "ignore_eos": WRONG_FLAGS,
    "speculate": NO_TEXTS,
    "constraint": NOT_OURS,
    "model": NOT_A_MODEL,
}
WRONG = {
    "SamplingParams": {
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), WRONG_NUMBERS),
        **dict.fromkeys(("typical_p", "xtc_probability", "xtc_threshold"), WRONG_NUMBERS),
        **dict.fromkeys(("dry_multiplier", "dry_base", "dynatemp_range", "dynatemp_exponent"), WRONG_NUMBERS),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta"), WRONG_NUMBERS),
        "top_n_sigma": WRONG_PENALTIES,
        **dict.fromkeys(("min_tokens", "dry_allowed_length"), WRONG_COUNTS),
        "dry_penalty_last_n": [*NO_NUMBERS, *TRUTHS, NAN, -2, 1.5],
        "mirostat": [*NO_NUMBERS, *TRUTHS, NAN, 1, 3, -1],
        "dry_sequence_breakers": [*NO_SOURCES, "\n", [""], ["x", 3], ["x" * 41], ["\ud800"]],
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), WRONG_PENALTIES),
        "top_k": WRONG_COUNTS,
        "temperature_first": WRONG_FLAGS,
        "seed": WRONG_INTEGERS,
        "logit_bias": [
            3,
            NAN,
            "3",
            None,
            True,
            [3],
            ((3, 3),),
            object(),
            {"3": 1},
            {3: NAN},
            {-1: 1},
            {3: "1"},
        ],
    },
    "RunConfig": {
        "page_size": FROM_1,
        **dict.fromkeys(("batch_size", "context"), WRONG_COUNTS),
        "activation_bits": [*WRONG_COUNTS, 7, 0],
        "draft": WRONG_FLAGS,
        **dict.fromkeys(("impl", "schedule", "weights", "all_reduce", "cache_dtype"), NOT_OURS),
        "state_dtype": [*NOT_OURS, None],
    },
    "Taps": {"read": [3, NAN, None, True, [3], object(), len, b"x", ["x"], "x"], "edit": NO_FUNCTIONS},
    "make_mesh": {"data": FROM_1, "model": FROM_1, "devices": [3, NAN, True, ["3"]]},
    "load": {
        "source": NO_SOURCES,
        "run": [*NOT_OURS, None],
        "mesh": NOT_OURS,
        "offline": WRONG_FLAGS,
        "progress": NO_FUNCTIONS,
    },
    "new_cache": {
        "model": NOT_A_MODEL,
        "batch_size": FROM_1,
        "context": FROM_1,
        "rewinds": WRONG_FLAGS,
    },
    "new_state": {
        "model": NOT_A_MODEL,
        "batch_size": FROM_1,
        "context": FROM_1,
        "params": [*NOT_OURS, None],
        "max_new_tokens": WRONG_COUNTS,
        "ignore_eos": WRONG_FLAGS,
        "speculate": NO_TEXTS,
    },
    "json_schema": {"schema": [3, NAN, None, True, [3], {3: object()}, object(), len, b"{}", "[", "3"]},
    "regex": {"pattern": [3, NAN, None, True, [3], {}, object(), len, b"a"]},
    "grammar": {"text": [3, NAN, None, True, [3], {}, object(), len, b"a"]},
    "choice": {"texts": [3, NAN, None, True, [3], {}, object(), len, b"a", "a", [], [""], ["a", 3]]},
    "generate": ANSWERS | {"progress": [3, NAN, object(), "yes", [3]], "prompts": [3, None, {3: 3}, [[]]]},
    "stream": ANSWERS | {"prompt": NO_TOKENS},
    "logits": {"model": NOT_A_MODEL, "token_ids": NO_TOKENS},
    "iter_logits": {"model": NOT_A_MODEL},
    "Engine": {
        "model": NOT_A_MODEL,
        **dict.fromkeys(("max_batch_size", "pages", "context", "prefill_tokens"), FROM_1),
        "logit_biases": FROM_1,
        "checkpoints": WRONG_COUNTS,
        "max_wait_s": [*WRONG_NUMBERS, INF],
        "reproducible": WRONG_FLAGS,
        "sampled_logprobs": WRONG_FLAGS,
        "speculate": NO_TEXTS,
        **DRAWS,
    },
    "update_params": {"params": [*NOT_OURS, None], "restart": WRONG_FLAGS},
    "submit": {
        name: ANSWERS[name] for name in ("max_new_tokens", "sampling", "stop", "ignore_eos", "constraint")
    }
    | {"prompt": NO_TOKENS, "priority": WRONG_INTEGERS, "n": FROM_1, "logprobs": WRONG_COUNTS},
    "result": {"timeout_s": [*NO_NUMBERS, *TRUTHS, NAN, -1, -INF]},
    "prefill": {"state": NOT_OURS, "config": NOT_OURS, "params": NOT_OURS, **DRAWS},
    "step": {"state": NOT_OURS, "config": NOT_OURS, "params": NOT_OURS, **DRAWS},
    "decode": {"state": NOT_OURS, "config": NOT_OURS, "params": NOT_OURS, **DRAWS}
    | {"limit": WRONG_COUNTS, "size": WRONG_COUNTS},
    "generate_tokens": {"state": NOT_OURS, "config": NOT_OURS, "params": NOT_OURS, **DRAWS}
    | {
        "size": FROM_1,
        "tokens": ["3", None, [[1.5]], [[LONG]], [1]],
        "lengths": ["3", None, [1.5], 1],
    },
    "extend": {"cache": NOT_OURS, "config": NOT_OURS, "params": NOT_OURS, "taps": NOT_OURS}
    | {"tokens": ["3", None, [[LONG]], [1]], "lengths": ["3", None, [1.5], 1, NAN]},
    "hidden_states": {"cache": NOT_OURS, "config": NOT_OURS, "params": NOT_OURS, "taps": NOT_OURS}
    | {"tokens": ["3", None, [[LONG]], [1]], "lengths": ["3", None, [1.5], 1, NAN]}
    | {"stop_at_layer": [*NO_NUMBERS, 0, -1, 99, 1.5, NAN]},
    "forward": {"config": NOT_OURS, "params": NOT_OURS, "taps": NOT_OURS}
    | {"tokens": ["3", None, [[LONG]], [1]], "lengths": ["3", None, [1.5], 1, NAN]},
    "embed": {"params": NOT_OURS, "tokens": ["3", None, [1.5], [LONG], object(), [True], NAN]},
    "save_state": {"path": [3.5, NAN, None, object(), [], {}], "state": NOT_OURS},
    "load_state": {"path": [3.5, NAN, None, object(), [], {}], "model": NOT_A_MODEL},
    "encode": {"text": [3, NAN, None, b"One", ["One"], object(), {}, True]},
    "decode_ids": {"ids": [3, NAN, None, ["3"], [1.5], object(), [None], [-1]]},
}


@pytest.mark.parametrize("function, name", [(f, name) for f, names in WRONG.items() for name in names])
def test_a_wrong_argument_is_named_at_once(function, name):
    call = CALLS[function]
    tiny(), engine(), state()
    for value in WRONG[function][name]:
        shown = type(value), "long" if isinstance(value, int) and abs(value) > 2**64 else value
        began = time.perf_counter()
        try:
            call(**{name: value})
        except (ValueError, TypeError) as error:
            message = str(error)
        else:
            pytest.fail(f"{function}({name}={shown}) is accepted")
        assert name.removesuffix("s") in message, (function, name, shown, message)
        assert time.perf_counter() - began < 1, (function, name, shown)


NUMPY = [np.int64(3), np.uint8(3), jnp.int32(3), np.array(3)]


@pytest.mark.parametrize("number", NUMPY, ids=[type(n).__name__ for n in NUMPY])
def test_numbers_of_numpy_and_jax_are_numbers(number):
    params = bj.SamplingParams(top_k=number, seed=number, temperature=number, logit_bias={3: number})
    assert params == bj.SamplingParams(top_k=3, seed=3, temperature=3, logit_bias={3: 3})
    assert type(params.seed) is int and type(params.temperature) is float
    run = bj.RunConfig(page_size=number, batch_size=number, context=number)
    assert hash(run) == hash(bj.RunConfig(page_size=3, batch_size=3, context=3))
    made = bj.new_state(tiny(), number, number, params, number)
    assert made.remaining.tolist() == [3, 3, 3] and made.cache.capacity >= 3
    assert bj.new_state(tiny(), 2, 8, params, np.array([1, 2])).remaining.tolist() == [1, 2]
    assert bj.make_mesh(number - 2, number - 2).size == 1
    answer = engine().submit("One", params, max_new_tokens=number, n=number, priority=number)
    assert [len(output.tokens) for output in answer.results(60)] == [3, 3, 3]


def test_a_cache_that_no_device_holds_is_refused_before_it_is_made():
    for call in (
        lambda: bj.new_cache(tiny(), 2**31 - 1, 2**31 - 1),
        lambda: bj.new_state(tiny(), 10**6, 10**6, bj.SamplingParams(), 1),
    ):
        with pytest.raises(MemoryError, match=r"batch_size=\d+ and context=\d+ take .* GB; .* has "):
            call()
    for sizes in ({"max_batch_size": 2**31 - 1}, {"pages": 2**31 - 1}):
        with pytest.raises(
            MemoryError, match=r"Engine: max_batch_size=\d+ and pages=\d+ take .* GB; .* has "
        ):
            bj.Engine(tiny(), **sizes)


def test_a_frozen_config_stays_one():
    params = dataclasses.replace(bj.SamplingParams(seed=np.uint8(255)), top_p=0.5)
    assert params.seed is not None and params.seed + 1 == 256
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # pyrefly: ignore[read-only]


def test_traced_limits_are_limits():
    def run(limit):
        options = {"limit": limit, "size": 2}
        return jax.eval_shape(lambda: bj.decode(tiny().params, state(), tiny().config, **options).tokens)

    assert jax.eval_shape(lambda limit: run(limit), jnp.int32(1)).shape == (1, 2)
