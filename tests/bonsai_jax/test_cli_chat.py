"""The command `chat`: a conversation that reuses its cache, and what is typed or piped into it."""

import functools
import re
import signal
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest

import bonsai_jax as bj
from bonsai_jax.cli import chat, thoughts
from bonsai_jax.cli.chat import Conversation
from tests.bonsai_jax.command_line import COMMAND, GREEDY, ROOT, TINY, run, tiny


@functools.cache
def engine(speculate=None) -> bj.Engine:
    return bj.Engine(tiny(), max_batch_size=1, speculate=speculate)


def answer(conversation, text):
    return "".join(piece.text for piece in conversation.ask(text))


def test_a_conversation_reuses_its_cache_and_answers_as_without():
    conversation = Conversation(engine(), GREEDY, max_new_tokens=6, ignore_eos=True)
    before = 0
    for turn in ("Hi there", "And then?", "Why?"):
        asked = [*conversation.messages, {"role": "user", "content": turn}]
        got = answer(conversation, turn)
        ids = tiny().tokenizer.encode_chat(asked)
        fresh = bj.generate(tiny(), [ids], max_new_tokens=6, sampling=GREEDY, ignore_eos=True)[0]
        assert got == fresh.text
        assert conversation.messages == [*asked, {"role": "assistant", "content": got}]
        assert conversation.reused >= before  # at least the prompt of the turn before
        assert conversation.figures.prompt_tokens == len(ids) - conversation.reused
        before = len(ids)


def test_the_same_message_again_after_a_reset_reads_one_token():
    conversation = Conversation(engine(), GREEDY, max_new_tokens=4, ignore_eos=True)
    first = answer(conversation, "Hi there")
    conversation.reset()
    assert answer(conversation, "Hi there") == first
    assert conversation.figures.prompt_tokens == 1


def test_speculation_knows_the_tokens_that_were_in_the_cache():
    conversation = Conversation(engine("ngram"), GREEDY, max_new_tokens=8, ignore_eos=True)
    for turn in ("Hi there", "Hi there"):
        got = answer(conversation, turn)
        ids = tiny().tokenizer.encode_chat(conversation.messages[:-1])
        fresh = bj.generate(tiny(), [ids], max_new_tokens=8, sampling=GREEDY, ignore_eos=True)[0]
        assert got == fresh.text
    assert " a step, " in chat.stats(conversation)
    known = conversation.engine._loop.runner._pool.speculation.ids[0, : len(ids)]
    assert conversation.reused > 8 and known.tolist() == ids


def test_a_stopped_answer_stays_and_the_next_one_is_right():
    conversation = Conversation(engine(), GREEDY, max_new_tokens=40, ignore_eos=True)
    pieces = conversation.ask("Hi there")
    shown = next(pieces).text + next(pieces).text
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    got = answer(conversation, "Go on")
    ids = tiny().tokenizer.encode_chat(conversation.messages[:-1])
    assert got == bj.generate(tiny(), [ids], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)[0].text
    assert conversation.reused > 0


def test_penalties_see_the_tokens_that_were_in_the_cache():
    params = bj.SamplingParams(temperature=0.0, repetition_penalty=1.5)
    conversation = Conversation(engine(), params, max_new_tokens=8, ignore_eos=True)
    answer(conversation, "Hi there")
    got = answer(conversation, "Go on")
    ids = tiny().tokenizer.encode_chat(conversation.messages[:-1])
    assert got == bj.generate(tiny(), [ids], max_new_tokens=8, sampling=params, ignore_eos=True)[0].text
    assert conversation.reused > 0


def test_a_full_context_is_said_and_the_message_forgotten():
    conversation = Conversation(engine(), GREEDY, max_new_tokens=4, ignore_eos=True)
    answer(conversation, "Hi")
    before = list(conversation.messages)
    with pytest.raises(ValueError, match=r"context holds 256: /reset begins a new one"):
        answer(conversation, "word " * 300)
    assert conversation.messages == before
    answer(conversation, "Hi")


DIM = re.compile("\x1b\\[2m(.*?)\x1b\\[0m", re.DOTALL)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_thoughts_are_dimmed_on_a_terminal(monkeypatch, capsys, size, prompt):
    """Tags and all, however they are cut into pieces; what only looks like a tag is none."""
    text = "I <thin air>" * (not prompt) + "<think>" * (not prompt) + "hm </thin\n</think>\n\nHello <b> <thi"
    conversation = SimpleNamespace(thinks=bool(prompt), figures=None)
    conversation.ask = lambda _: (SimpleNamespace(text=text[i : i + size]) for i in range(0, len(text), size))
    monkeypatch.setenv("FORCE_COLOR", "1")
    chat.answer(conversation, "Hi")
    shown = capsys.readouterr().out
    assert "".join(DIM.findall(shown)) == text[text.find("<think>") if not prompt else 0 :].split("\n\n")[0]
    assert DIM.sub(r"\1", shown) == text + "\n"
    monkeypatch.delenv("FORCE_COLOR")
    chat.answer(conversation, "Hi")
    assert capsys.readouterr().out == text + "\n"


def test_a_prompt_that_opens_a_thought_is_known():
    encode = tiny().tokenizer.encode
    assert thoughts.begun(tiny().tokenizer, encode("Hi there\n<think>\n"))
    assert not thoughts.begun(tiny().tokenizer, encode("Hi there\n<think>\n\n</think>\n\n"))


def test_piped_chat():
    first = Conversation(engine(), GREEDY, max_new_tokens=4, ignore_eos=True)
    expected = answer(first, "Hi"), answer(first, "More")
    stdin = "/stats\nHi\nMore\n/stats\n/reset\n\n/what\nHi\n/system Be kind.\nHi\n/exit\nnever read\n"
    done = run("chat", "-m", TINY, "-n", 4, "--temp", 0, "--ignore-eos", "-c", 256, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    kind = Conversation(engine(), GREEDY, max_new_tokens=4, ignore_eos=True, system="Be kind.")
    kind.messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": expected[0]}]
    assert done.stdout == "\n".join([*expected, expected[0], answer(kind, "Hi")]) + "\n"
    assert "no answer yet" in done.stderr and "/what is no command" in done.stderr
    assert "tokens of the prompt were in the cache" in done.stderr
    assert ">" not in done.stdout  # no prompt where nobody types


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_a_command_leaves_and_help_names_it(leave):
    done = run("chat", "-m", TINY, "-n", 2, stdin=f"/help\n{leave}\n/stats\n")
    assert done.exit_code == 0 and done.stdout == ""
    assert leave in done.stderr and "no answer yet" not in done.stderr


def test_who_types_is_told_how_to_leave(monkeypatch):
    monkeypatch.setattr(chat.sys, "stdin", mock.Mock(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=EOFError))  # Ctrl-D
    said = []
    monkeypatch.setattr(chat, "say", said.append)
    monkeypatch.setattr(chat.options.LoadOptions, "load", lambda *_: tiny())
    chat.command(name=TINY)
    assert said == [f"{TINY}, context 256; /help lists the commands; /quit or Ctrl-D leaves", ""]


def test_chat_goes_on_after_a_message_that_does_not_fit():
    done = run("chat", "-m", TINY, "-n", 2, "-c", 256, stdin="word " * 300 + "\nHi\n")
    assert done.exit_code == 0
    assert "/reset begins a new one" in done.stderr
    assert len(done.stdout.splitlines()) >= 1


def test_ctrl_c_stops_the_answer_and_not_the_chat():
    arguments = ["chat", "-m", TINY, "-c", "2048", "--ignore-eos", "--temp", "0"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(b"/stats\n/exit\n", timeout=60)
    assert process.returncode == 0, stderr
    assert b"Traceback" not in stderr and b"the prompt were in the cache" in stderr
    assert int(stderr.split(b"context ")[-1].split()[0]) < 2048  # it had not come to its end
