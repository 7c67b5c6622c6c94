"""Cached beginnings of prompts in files: another engine continues from them and says the same, for layers of
attention alone, recurrent states and windows; damaged files, other owners and other models; a bound."""

import logging
import os
import time

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.engine.prefix_folder import PrefixFolder
from bonsai_jax.engine.prefix_store import identity
from tests.bonsai_jax.test_engine import GREEDY, prompt

PAGE, NEW = 16, 4


def load(name: str, state_dtype: str = "float32") -> bj.Model:
    context = 1024 if name == "tiny-gemma3" else 256  # longer than its rings
    run = bj.RunConfig(context=context, batch_size=1, page_size=PAGE, state_dtype=state_dtype)
    return bj.load(f"synth:{name}:q8_0", run)


def ask(model: bj.Model, folder, *prompts: list[int], owner: str = "", **more):
    """Answers of a new engine, one after another."""
    how = {"prefill_tokens": 32, "max_batch_size": 1, "prefix_cache": folder, **more}
    with bj.Engine(model, **how) as engine:
        options = {"max_new_tokens": NEW, "ignore_eos": True, "owner": owner}
        outputs = [engine.submit(ids, GREEDY, **options).result(200) for ids in prompts]
        wait(lambda: (load := engine.load()).free_pages + load.cached_pages == load.pages)  # none is lost
    return outputs


def wait(condition, seconds: float = 20) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def files(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(
    scope="module",
    params=[("tiny-llama",), ("tiny-qwen35",), ("tiny-qwen35", "float16"), ("tiny-gemma3",)],
    ids=" ".join,
)
def model(request):
    return load(*request.param)


def test_the_next_process_continues_where_the_last_one_ended(model, tmp_path, caplog):
    """From the end of an answer; from a place within its prompt; from fewer pages where a file is damaged."""
    first = prompt(70, 1)
    (before,) = ask(model, tmp_path, first)
    ended = [*first, *before.tokens]
    longer, parted = [*ended, *prompt(9, 2)], [*first[:66], *prompt(9, 3)]
    expected = [ask(model, None, ids)[0].tokens for ids in (longer, parted)]
    after = ask(model, tmp_path, longer, parted)
    assert [output.tokens for output in after] == expected
    pages_only = not any(path.suffix == ".state" for path in files(tmp_path))
    assert after[0].cached_tokens == (64 if pages_only else len(ended) - 1)
    assert after[1].cached_tokens in (64, 66)  # in memory by now, page by page or within one
    assert ask(model, tmp_path, longer, owner="other")[0].cached_tokens == 0
    for path in files(tmp_path):
        assert path.stat().st_mode & 0o077 == 0 and path.parent.parent == tmp_path
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        (again,) = ask(model, tmp_path, longer)
    assert again.tokens == expected[0] and again.cached_tokens == 0
    assert "damaged" in caplog.text


def test_files_of_states_in_16_bits_are_not_those_of_others():
    names, words = [], []
    for dtype in ("float32", "float16"):
        own = load("tiny-qwen35", dtype)
        with bj.Engine(own, max_batch_size=1) as engine:
            runner = engine._loop.runner
            names.append(identity(own, runner))
            words.append(runner.calls.stored_layout[2])
    assert names[0] != names[1]
    assert words[0] - words[1] == 3 * 4 * 64 * 64 // 2  # layers, heads, and S of each


@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-gemma3"])
def test_copies_take_the_memory_of_a_state_and_not_of_all_rows(name):
    """A 27B with 256 rows has no room for the states of all rows twice."""
    own = load(name)
    with bj.Engine(own, max_batch_size=32, pages=64) as engine:
        runner = engine._loop.runner
        _, page_words, state_words = runner.calls.stored_layout
        page, state, pool = 4 * page_words, 4 * state_words, runner._pool
        assert sum(x.nbytes for x in jax.tree.leaves(pool)) > 20 * max(state, 8 * page)
        words = np.zeros(state_words, np.int32)
        for call in (
            runner.calls.save(None),
            runner.calls.read_state(0),
            runner.calls.write_state(0, words),
            runner.calls.read_pages([]),
        ):
            lowered = call.function.lower(own.params, pool, *call.placed(None), *call.static, **call.options)
            assert lowered.compile().memory_analysis().temp_size_in_bytes < 2 * max(state, 8 * page) + 4096


def test_a_folder_keeps_what_was_used_last_and_no_more_than_its_bound(tmp_path):
    folder = PrefixFolder(tmp_path, "own", 5000)
    keys = [folder.next(folder.root("ann"), [n]) for n in range(4)]
    names = [folder.page(key) for key in keys]
    for age, name in enumerate(names):
        folder.write(name, bytes(1000))
        os.utime(tmp_path / "own" / name, (age, age))
    (tmp_path / "own" / "theirs.txt").write_text("none of ours")
    folder.used([names[0]])
    folder.write(folder.state(keys[0], [5, 6]), bytes(1500))  # beyond the bound: the oldest go
    assert [folder.has(name) for name in names] == [True, False, False, True]
    assert folder.states(keys[0]) == [(2, folder.state(keys[0], [5, 6]))]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 5000
    assert (tmp_path / "own" / "theirs.txt").exists()


def test_two_processes_may_share_a_folder(tmp_path, caplog):
    """Both write the same file; one removes what the other has listed; half a file is nobody's."""
    one, two = (PrefixFolder(tmp_path, "own", 10**6) for _ in range(2))
    key = one.root("")
    name = one.state(key, [1])
    one.write(name, b"1234")
    two.write(name, b"1234")
    assert bytes(one.read(name, 4)) == bytes(two.read(name, 4)) == b"1234"
    (tmp_path / "own" / name).unlink()
    assert one.read(name, 4) is None and not caplog.records
    for content in (b"", b"1234", b"bonsai-jax prefix 1\n" + bytes(36)):
        (tmp_path / "own" / name).write_bytes(content)
        assert two.read(name, 4) is None and not two.has(name)
    assert len(caplog.records) == 3 and all("damaged" in record.message for record in caplog.records)
    one.write(name, b"1234")
    (tmp_path / "own" / name).rename(tmp_path / "own" / two.page(key))  # another's content
    assert two.read(two.page(key), 4) is None


def test_names_tell_owners_and_tokens_apart(tmp_path):
    folder = PrefixFolder(tmp_path, "own", 10**6)
    roots = [folder.root(owner) for owner in ("ann", "bob", "")]
    keys = [folder.next(root, tokens) for root in roots for tokens in ([1, 2], [1, 3], [12])]
    assert len({*roots, *keys}) == 12 and not any("ann" in key for key in keys)


def test_what_cannot_be_kept_is_refused(tmp_path):
    own = load("tiny-llama")
    with pytest.raises(ValueError, match="reproducible"):
        bj.Engine(own, prefix_cache=tmp_path, reproducible=True)
    with pytest.raises(ValueError, match="taps"):
        bj.Engine(own, prefix_cache=tmp_path, taps=bj.Taps(edit=lambda site, layer, x: x))
    with pytest.raises(TypeError, match="prefix_cache"):
        bj.Engine(own, prefix_cache=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        bj.Engine(own, prefix_cache=tmp_path / "file")
