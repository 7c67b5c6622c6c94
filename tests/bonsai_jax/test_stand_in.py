"""A program that is there stands in for one that would have to be compiled (engine/stand_in.py)."""

import dataclasses

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.engine import programs, stand_in, stored


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet(monkeypatch, tmp_path):
    """As in a process of a user who has an empty folder of programs."""
    monkeypatch.setattr(stand_in, "MOST_S", 0.5)
    monkeypatch.setattr(stand_in, "_lost", {})
    monkeypatch.setattr(programs, "compiled", {})
    monkeypatch.setattr(stored, "programs_folder", lambda: tmp_path)


@pytest.fixture
def compiled(monkeypatch):
    """The keys of programs that are compiled and stored."""
    keys, compile_it = [], stored.compile
    noted = lambda key, *rest: (keys.append(key), compile_it(key, *rest))[1]  # noqa: E731
    monkeypatch.setattr(stored, "compile", noted)
    return keys


@pytest.fixture(scope="module")
def model():
    """Whose texts have the same bits in chunks of any size."""
    return bj.load(
        "synth:tiny-llama:q8_0", bj.RunConfig(batch_size=8, context=832)
    )  # as no other test has it


def answers(model, count: int, new: int = 6) -> list[list[int]]:
    prompts = [np.random.default_rng(n).integers(0, 256, 5 + n).tolist() for n in range(count)]
    noise = bj.SamplingParams(0.9, seed=3)
    outputs = bj.generate(model, prompts, max_new_tokens=new, sampling=noise, ignore_eos=True)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize(("first", "then"), [(1, 3), (5, 2), (1, 8), (8, 1)])
def test_another_number_of_prompts_compiles_nothing(model, compiled, monkeypatch, first, then):
    answers(model, first)
    del compiled[:]
    by_stand_in = answers(model, then)
    assert not compiled
    monkeypatch.setattr(stand_in, "MOST_S", -1.0)
    assert answers(model, then) == by_stand_in and compiled


@pytest.mark.parametrize(("first", "then"), [(10, 150), (128, 10)])
def test_a_prompt_of_another_length_compiles_nothing(model, compiled, monkeypatch, first, then):
    def answer(length):
        noise = bj.SamplingParams(0.9, seed=3)
        (output,) = bj.generate(model, [[n % 200 for n in range(length)]], max_new_tokens=4, sampling=noise)
        return output.tokens

    answer(first)
    del compiled[:]
    by_stand_in = answer(then)
    assert not compiled
    monkeypatch.setattr(stand_in, "MOST_S", -1.0)
    assert answer(then) == by_stand_in and compiled


def test_a_program_in_a_file_stands_in(model, compiled):
    """In the next process."""
    alone = answers(model, 1)
    programs.compiled.clear()
    del compiled[:]
    assert answers(model, 3)[:1] == alone and not compiled


def test_a_program_is_compiled_the_third_time(model, compiled):
    """Also that of a prefill, which several plans of a call ask for."""
    model = dataclasses.replace(model, run=dataclasses.replace(model.run, context=1856))  # nor this one
    answers(model, 1)
    for has_compiled in (False, False, True, False, False):
        del compiled[:]
        answers(model, 8)
        assert bool(compiled) == has_compiled


def test_a_program_is_asked_for_once_it_should_be_compiled():
    """Where none is there nobody can say which: the scheduler compiles one that others can use, too."""
    there = set()

    def best():
        programs_of_a_call = stand_in.StandIns(there.__contains__, lambda size: size, 0, counts=True)
        return programs_of_a_call.best("own", ["own", "padded"], {"own": 1, "padded": 2}.get)

    assert best() is None
    there.add("padded")
    assert [best() for _ in range(4)] == ["padded", "padded", "own", "own"]


def test_stand_ins_lose_half_a_second_at_most(model, compiled, monkeypatch):
    monkeypatch.setattr(stand_in, "MOST_TIMES", 100)
    answers(model, 1)
    lost_s = (stand_in.steps(1, [6] * 3) - stand_in.steps(4, [6] * 3)) * stand_in.LEAST_S
    monkeypatch.setattr(stand_in, "LEAST_S", stand_in.LEAST_S * 0.2 / lost_s)  # a call loses 0.2 s
    for has_compiled in (False, False, True, False):
        del compiled[:]
        answers(model, 3)
        assert bool(compiled) == has_compiled


def test_what_is_asked_ahead_of_time_loses_nothing(model, compiled):
    answers(model, 1)
    del compiled[:]
    for _ in range(3):
        bj.compile_ahead(model, ["Hello"] * 3, max_new_tokens=6)
    answers(model, 3)
    assert not compiled and len(stand_in._lost) == 1


def test_what_takes_no_longer_is_always_used(model, compiled, monkeypatch):
    """Where all the time that may be lost is lost, too."""
    answers(model, 1)
    monkeypatch.setattr(stand_in, "MOST_S", 0.0)
    del compiled[:]
    answers(model, 1, new=20)
    assert not compiled
    answers(model, 2)
    assert compiled


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_those_of_answers_that_take_turns(seed):
    """Beside a simulation, step by step."""
    rng = np.random.default_rng(seed)
    rows, lengths = int(rng.integers(1, 9)), rng.integers(1, 50, rng.integers(1, 30)).tolist()
    lengths = lengths if seed % 2 else lengths[:1] * len(lengths)
    waiting, running, steps = list(lengths), [], 0
    while waiting or running:
        running += [waiting.pop(0) for _ in range(min(rows - len(running), len(waiting)))]
        running = [left - 1 for left in running if left > 1]
        steps += 1
    assert stand_in.steps(rows, lengths) == steps * (1 + rows / stand_in.ROWS_TWICE)
