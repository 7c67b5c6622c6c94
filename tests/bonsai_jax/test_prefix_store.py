"""Cached beginnings of prompts in files: another engine continues from them and says the same, for layers of
attention alone, recurrent states and windows; damaged files, other owners and other models; a bound."""

import logging
import time

import pytest

import bonsai_jax as bj
from bonsai_jax.engine.prefix_folder import PrefixFolder
from tests.bonsai_jax.test_engine import GREEDY, prompt

PAGE, NEW = 16, 4


def load(name: str) -> bj.Model:
    return bj.load(f"synth:{name}:q8_0", bj.RunConfig(context=256, batch_size=1, page_size=PAGE))


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


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen35", "tiny-gemma3"])
def model(request):
    return load(request.param)


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
