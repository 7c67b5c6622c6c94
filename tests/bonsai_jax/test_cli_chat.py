"""The command `chat`: a conversation that reuses its cache, and what is typed or piped into it."""

import dataclasses
import functools
import json
import re
import shlex
import signal
import subprocess

import pytest

import bonsai_jax as bj
from bonsai_jax import machine
from bonsai_jax.cli import chat, options
from bonsai_jax.cli.chat import commands
from bonsai_jax.cli.chat.commands import Session
from bonsai_jax.cli.chat.conversation import Conversation
from bonsai_jax.cli.chat.local import Local, whole_context
from bonsai_jax.weights import memory
from checkpoints import open_checkpoint
from tests.bonsai_jax.command_line import COMMAND, GREEDY, ROOT, TINY, complaints, run, tiny
from tests.bonsai_jax.scripted import limit, scripts, with_template
from tests.bonsai_jax.test_agents import common
from tests.bonsai_jax.test_engine import tiny as hybrid
from tests.bonsai_jax.test_speculation import HYBRID
from tests.bonsai_jax.tool_templates import HERMES

THOUGHT = "<think>\nHm.\n</think>\n\nYes."
WITHOUT_THOUGHTS = HERMES.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


@functools.cache
def engine(speculate=None) -> bj.Engine:
    return bj.Engine(tiny(), max_batch_size=1, speculate=speculate)


def answer(conversation, text):
    return "".join(piece.text for piece in conversation.ask(text))


def encode(conversation, messages):
    return conversation.backend.encode(conversation.question(messages))


def test_a_conversation_reuses_its_cache_and_answers_as_without():
    conversation = Conversation(Local(engine()), GREEDY, max_new_tokens=6, ignore_eos=True)
    before = 0
    for turn in ("Hi there", "And then?", "Why?"):
        asked = [*conversation.messages, {"role": "user", "content": turn}]
        got = answer(conversation, turn)
        ids = tiny().tokenizer.encode_chat(asked)
        fresh = bj.generate(tiny(), [ids], max_new_tokens=6, sampling=GREEDY, ignore_eos=True)[0]
        assert got == fresh.text
        assert conversation.messages == [*asked, {"role": "assistant", "content": got}]
        assert conversation.reply.reused >= before  # at least the prompt of the turn before
        assert conversation.reply.figures.prompt_tokens == len(ids) - conversation.reply.reused
        before = len(ids)


def test_a_hybrid_models_next_turn_reads_on_where_its_prompt_departs():
    """The template drops thoughts from the history, so that is before the answer, wherever in a page it is; a
    state is saved before the header of the answer."""
    model = with_template(hybrid(HYBRID), WITHOUT_THOUGHTS)
    how = {"prefill_tokens": 32, "logits_processor": scripts(model, [THOUGHT])}
    header = len(model.tokenizer.encode_chat_text("<|im_start|>assistant\n"))
    again = []
    with bj.Engine(model, max_batch_size=1, context=512, **how) as engine:
        for length in range(0, model.run.page_size, 4):
            conversation = Conversation(Local(engine), GREEDY, max_new_tokens=limit(0))
            answer(conversation, f"{'?' * length} Hi")
            before = conversation.reply.ids
            answer(conversation, "And then?")
            reply = conversation.reply
            again.append(reply.figures.prompt_tokens - (len(reply.ids) - common(reply.ids, before)))
    assert again == [header] * len(again)


def test_the_same_message_again_after_a_reset_reads_one_token():
    conversation = Conversation(Local(engine()), GREEDY, max_new_tokens=4, ignore_eos=True)
    first = answer(conversation, "Hi there")
    conversation.reset()
    assert answer(conversation, "Hi there") == first
    assert conversation.reply.figures.prompt_tokens == 1


def test_speculation_knows_the_tokens_that_were_in_the_cache():
    conversation = Conversation(Local(engine("ngram")), GREEDY, max_new_tokens=8, ignore_eos=True)
    for turn in ("Hi there", "Hi there"):
        got = answer(conversation, turn)
        ids = tiny().tokenizer.encode_chat(conversation.messages[:-1])
        fresh = bj.generate(tiny(), [ids], max_new_tokens=8, sampling=GREEDY, ignore_eos=True)[0]
        assert got == fresh.text
    assert " a step, " in conversation.reply.stats()
    known = conversation.backend.engine._loop.runner._pool.speculation.ids[0, : len(ids)]
    assert conversation.reply.reused > 8 and known.tolist() == ids


def test_a_stopped_answer_stays_and_the_next_one_is_right():
    conversation = Conversation(Local(engine()), GREEDY, max_new_tokens=40, ignore_eos=True)
    pieces = conversation.ask("Hi there")
    shown = next(pieces).text + next(pieces).text
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    got = answer(conversation, "Go on")
    ids = tiny().tokenizer.encode_chat(conversation.messages[:-1])
    assert got == bj.generate(tiny(), [ids], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)[0].text
    assert conversation.reply.reused > 0


def test_penalties_see_the_tokens_that_were_in_the_cache():
    params = bj.SamplingParams(temperature=0.0, repetition_penalty=1.5)
    conversation = Conversation(Local(engine()), params, max_new_tokens=8, ignore_eos=True)
    answer(conversation, "Hi there")
    got = answer(conversation, "Go on")
    ids = tiny().tokenizer.encode_chat(conversation.messages[:-1])
    assert got == bj.generate(tiny(), [ids], max_new_tokens=8, sampling=params, ignore_eos=True)[0].text
    assert conversation.reply.reused > 0


def test_an_answer_that_is_stopped_before_its_first_token_leaves_no_message():
    conversation = Conversation(Local(engine()), GREEDY, max_new_tokens=40, ignore_eos=True)
    conversation.interrupt()  # Ctrl-C while the message is encoded
    assert answer(conversation, "Hi there") == "" and conversation.messages == []
    conversation.resume()
    assert answer(conversation, "Hi there") and len(conversation.messages) == 2


def test_warming_up_changes_no_answer():
    conversation = Conversation(Local(engine()), GREEDY, max_new_tokens=6, ignore_eos=True)
    expected = answer(conversation, "Hi there")
    warm = Conversation(Local(engine()), GREEDY, max_new_tokens=6, ignore_eos=True)
    warm.warm_up()
    assert answer(warm, "Hi there") == expected and warm.messages == conversation.messages


def talked(turns, **options):
    """A conversation in which the user has said something so many times."""
    conversation = Conversation(Local(engine()), GREEDY, max_new_tokens=8, ignore_eos=True, **options)
    for turn in range(turns):
        said = [("user", f"question number {turn}"), ("assistant", f"the answer to it is {turn}")]
        conversation.messages += [{"role": role, "content": text} for role, text in said]
    return conversation


def test_a_full_context_drops_the_oldest_turns():
    conversation = talked(12, system="Be kind.")
    before = list(conversation.messages)
    assert len(encode(conversation, before)) > 256
    assert answer(conversation, "And now?")
    assert conversation.messages[: len(before)] == before  # they stay for /save
    assert conversation.dropped > 0 and conversation.messages[conversation.dropped]["role"] == "user"
    seen = encode(conversation, conversation.messages[conversation.dropped : -1])
    assert len(seen) <= 128 and "Be kind." in tiny().tokenizer.decode(seen)  # half of the context is free
    longer = encode(conversation, conversation.messages[conversation.dropped - 2 : -1])
    assert len(longer) > 128
    dropped = conversation.dropped
    assert answer(conversation, "And then?") and conversation.dropped == dropped
    assert conversation.reply.reused > 64  # the turns that stayed are in the cache


def test_a_full_context_stops_by_choice():
    conversation = talked(12, on_full="stop")
    before = list(conversation.messages)
    with pytest.raises(ValueError, match=r"context holds 256: /reset begins a new one, --on-full drop"):
        answer(conversation, "And now?")
    assert conversation.messages == before
    conversation.reset()
    assert answer(conversation, "And now?")


@pytest.mark.parametrize("on_full", ["drop", "stop"])
def test_a_message_that_does_not_fit_is_forgotten(on_full):
    conversation = talked(1, on_full=on_full)
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="context holds 256"):
        answer(conversation, "word " * 300)
    assert conversation.messages == before
    assert answer(conversation, "Hi")


def test_a_long_message_takes_the_room_of_all_turns():
    conversation = talked(4)
    assert answer(conversation, "word " * 65)  # leaves less than a quarter of the context
    assert conversation.dropped == 8


def obey(conversation, *lines, open=None):
    """What the commands say, in order."""
    session = Session(conversation, open)
    return [session.obey(line) for line in lines]


def test_undo_retry_and_edit():
    conversation = talked(3)
    undone, retried = obey(conversation, "/undo", "/retry")
    assert undone.say == "forgotten: question number 2"
    assert (retried.ask, retried.replaces, retried.retry) == ("question number 1", True, 1)
    (edited,) = obey(conversation, "/edit")
    assert edited.edit == "question number 1" and len(conversation.messages) == 4  # until it is sent
    before = conversation.messages[:2]
    got = "".join(piece.text for piece in conversation.ask("Another?", replaces=True))
    assert conversation.messages == [
        *before,
        {"role": "user", "content": "Another?"},
        {"role": "assistant", "content": got},
    ]
    obey(conversation, "/undo", "/undo")
    for line in ("/undo", "/retry", "/edit"):
        with pytest.raises(ValueError, match="there is no message yet"):
            obey(conversation, line)


def test_another_try_that_gives_nothing_leaves_the_answer():
    conversation = talked(2)
    before = list(conversation.messages)
    conversation.interrupt()
    list(conversation.ask("question number 1", replaces=True))
    assert conversation.reply.figures.tokens == []
    conversation.resume()
    with pytest.raises(ValueError, match="context holds 256"):
        conversation.ask("word " * 300, replaces=True)
    assert conversation.messages == before


def test_another_try_has_another_seed(monkeypatch):
    sampling = bj.SamplingParams(seed=5)
    conversation = Conversation(Local(engine()), sampling, max_new_tokens=2, ignore_eos=True)
    seeds, submit = [], engine().submit

    def note(ids, params, **how):
        seeds.append(params.seed)
        return submit(ids, params, **how)

    monkeypatch.setattr(engine(), "submit", note)
    session = Session(conversation, None)
    answer(conversation, "Hi")
    for line in ("/retry", "/retry", "/tokens", "/retry"):
        outcome = session.obey(line)
        if outcome.ask is not None:
            list(conversation.ask(outcome.ask, replaces=outcome.replaces, retry=outcome.retry))
    assert seeds == [5, 6, 7, 6] and len(conversation.messages) == 2


def test_a_conversation_is_saved_and_loaded(tmp_path):
    conversation, path = talked(2, system="Be kind."), tmp_path / "talk.json"
    (saved,) = obey(conversation, f"/save {path}")
    assert saved.say == f"{path}: 4 messages"
    body = json.loads(path.read_text())
    assert body["model"] == TINY and body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert body["messages"][1:] == conversation.messages
    fresh = Conversation(Local(engine()), GREEDY)
    obey(fresh, f"/load {path}", "/save")  # to the same file
    assert (fresh.messages, fresh.system) == (conversation.messages, "Be kind.")
    assert json.loads(path.read_text()) == body
    with pytest.raises(ValueError, match="there is such a file already"):
        obey(conversation, f"/save {path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a conversation: Expecting"),
        ("[" * 100_000, "not a conversation"),
        ('{"messages": 3}', "expected .messages., a list"),
        ('[{"role": "tool", "content": "x"}]', "message 1 is .*expected a role"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "message 2 is"),
        ('[{"role": "user", "content": 3}]', "message 1 is"),
        ("[3]", "message 1 is '3'"),
    ],
)
def test_files_without_a_conversation_are_refused(tmp_path, content, message):
    conversation, path = talked(1), tmp_path / "talk.json"
    before = list(conversation.messages)
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        obey(conversation, f"/load {path}")
    assert conversation.messages == before


def test_settings():
    conversation = talked(0)
    said = obey(
        conversation,
        "/set temperature 0.5",
        "/set --top-k=7",
        "/set repeat_penalty 1.5",
        "/set max_tokens 9",
        "/set think off",
        "/set seed 3",
        "/set top_p",
    )
    assert [outcome.say for outcome in said] == [
        *("temperature 0.5", "top_k 7", "repetition_penalty 1.5", "max_new_tokens 9", "think off", "seed 3"),
        "top_p 0.95",
    ]
    sampling = bj.SamplingParams(temperature=0.5, top_k=7, repetition_penalty=1.5, seed=3)
    assert (conversation.sampling, conversation.max_new_tokens, conversation.think) == (sampling, 9, False)
    (listed,) = obey(conversation, "/set")
    assert "min_p 0.05\n" in listed.say and "think off" in listed.say
    obey(conversation, "/set seed none", "/set think default", "/set temperature_first on")
    assert conversation.sampling.seed is None and conversation.think is None
    assert conversation.sampling.temperature_first is True


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature warm", "^temperature is 'warm'; it must be a number"),
        ("/set top_p 3", "^top_p is 3; it must lie in 0 to 1"),
        ("/set top_k 1.5", "^top_k is 1.5; it must be a whole number"),
        ("/set temperature nan", "^temperature is nan"),
        ("/set max_new_tokens 0", "^max_new_tokens is 0; it must be a whole number"),
        ("/set max_new_tokens 2.5", "^max_new_tokens is 2.5; it must be a whole number"),
        ("/set think maybe", "^think is 'maybe'; it must be on, off or default"),
        ("/set temperature_first 3", "^temperature_first is '3'; it must be on or off"),
        ("/set wind 3", "^/set has no wind; it sets temperature, top_k"),
        ("/save", "needs the name of a file"),
        ("/load", "needs the name of a file"),
    ],
)
def test_commands_that_cannot_be_carried_out_change_nothing(line, message):
    conversation = talked(1)
    before = dataclasses.replace(conversation)
    with pytest.raises(ValueError, match=message):
        obey(conversation, line)
    assert conversation == before


def test_the_model_changes_and_the_conversation_stays():
    conversation = talked(1)
    named, other = [], Local(bj.Engine(tiny(), max_batch_size=1, context=128))

    def open_model(name):
        named.append(name)
        if name == "broken":
            raise ValueError("no such file")
        return other

    with other.engine, pytest.raises(ValueError, match="no such file"):
        obey(conversation, "/model", "/model other", "/model broken", open=open_model)
    assert named == ["other", "broken", TINY]  # the one before again
    assert conversation.backend is other and len(conversation.messages) == 2


def test_tokens_are_counted():
    conversation = talked(12)
    used = len(encode(conversation, conversation.messages))
    assert obey(conversation, "/tokens")[0].say == f"{used} of 256 tokens are used, 0 are free"
    answer(conversation, "And now?")
    used = len(encode(conversation, conversation.messages[conversation.dropped :]))
    assert obey(conversation, "/tokens")[0].say == (
        f"{used} of 256 tokens are used, {256 - used} are free; the model no longer sees the oldest "
        f"{conversation.dropped} messages"
    )
    obey(conversation, "/reset")
    assert obey(conversation, "/tokens")[0].say == "0 of 256 tokens are used, 256 are free"


def test_the_status_says_how_an_answer_ended():
    conversation = Conversation(Local(engine()), GREEDY, max_new_tokens=4, ignore_eos=True)
    answer(conversation, "Hi")
    assert re.fullmatch(
        r"cut off by max_new_tokens, [\d.]+ tok/s, 4 tokens, context \d+ of 256",
        commands.status(conversation),
    )
    conversation.max_new_tokens = -1
    answer(conversation, "Hi")
    assert commands.status(conversation).startswith("the context is full, ")
    pieces = conversation.ask("Hi")
    conversation.interrupt()
    list(pieces)
    conversation.resume()
    assert commands.status(conversation) == "stopped; the conversation stays as it was"


@pytest.mark.parametrize(("free_mb", "least", "most"), [(10_000, 8192, 8192), (60, 64, 8000), (1, 64, 64)])
def test_the_context_is_the_models_own_or_what_memory_holds(monkeypatch, free_mb, least, most):
    monkeypatch.setattr(machine, "free_memory", lambda: free_mb * 10**6)
    config = options.RunOptions().config(context=0)
    context = whole_context(open_checkpoint(TINY), config, 1).context
    assert least <= context <= most and context % 64 == 0
    if free_mb == 60:
        token_bytes = memory.bytes_per_token(tiny().config, tiny().run)
        assert 0.5 * 15e6 < context * token_bytes <= 15e6  # weights take some of it
    assert whole_context(open_checkpoint(TINY), dataclasses.replace(config, context=300), 1).context == 300


def test_piped_chat():
    first = Conversation(Local(engine()), GREEDY, max_new_tokens=4, ignore_eos=True)
    expected = answer(first, "Hi"), answer(first, "More")
    stdin = "/stats\nHi\nMore\n/stats\n/reset\n\n/what\nHi\n/system Be kind.\nHi\n/exit\nnever read\n"
    done = run("chat", "-m", TINY, "-n", 4, "--temp", 0, "--ignore-eos", "-c", 256, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    kind = Conversation(Local(engine()), GREEDY, max_new_tokens=4, ignore_eos=True, system="Be kind.")
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


def test_chat_goes_on_after_a_message_that_does_not_fit():
    done = run("chat", "-m", TINY, "-n", 2, "-c", 256, stdin="word " * 300 + "\nHi\n//Hi\n")
    assert done.exit_code == 0
    assert "--ctx sets a larger context" in done.stderr
    assert len(done.stdout.splitlines()) >= 2 and "is no command" not in done.stderr


def test_a_reader_that_has_enough_ends_the_chat():
    script = f"{shlex.join(COMMAND)} chat -m {TINY} -n 8 --ignore-eos | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], input=b"Hi\n" * 20, capture_output=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0
    assert not complaints(done.stderr.decode())  # one error for each message, if the chat went on


def test_an_engine_that_fails_leaves_the_conversation(monkeypatch, capsys):
    conversation = talked(1)
    session = Session(conversation, None)

    def fail(*_, **__):
        raise RuntimeError("the engine failed")

    monkeypatch.setattr(Conversation, "ask", fail)
    chat.respond(session, "Hi", typed=True, plain=True)
    assert capsys.readouterr().err == "error: the engine failed\n" and len(conversation.messages) == 2
    with pytest.raises(RuntimeError, match="the engine failed"):
        chat.respond(session, "Hi", typed=False, plain=True)


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
