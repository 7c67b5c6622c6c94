"""What a part of a stream is sent as, without a server: the bytes are those of json and h11."""

import asyncio
import json

import h11
import pytest
from anthropic.types import RawContentBlockDeltaEvent
from openai.types.responses import (
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseTextDeltaEvent,
)

import bonsai_jax as bj
from bonsai_jax.engine.answers import Piece
from bonsai_jax.engine.handle import Handle
from bonsai_jax.engine.wakes import Wakes
from bonsai_jax.engine.wakes import _set as setting
from bonsai_jax.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from bonsai_jax.protocols.answers import Head, Part, ServerEvent, Template
from bonsai_jax.server.connections import CORKED, Chunked, Corked
from bonsai_jax.tokens.answer_parser import Event
from checkpoints import open_checkpoint
from tests.bonsai_jax.command_line import TINY

HI = {"role": "user", "content": "a"}
KINDS = [("thought", None), ("answer", None), ("call", "now")]
ANTHROPIC = [("thinking_delta", "thinking"), ("text_delta", "text"), ("input_json_delta", "partial_json")]
RESPONSES = [ResponseReasoningTextDeltaEvent, ResponseTextDeltaEvent, ResponseFunctionCallArgumentsDeltaEvent]
PLACE, TEXT = {"content_index": 0}, {"logprobs": []}
TEXTS = ['a "quoted" text', "\n\t\\", "é漢🌳", "\ud83c", "\0", "<|im_end|>"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_template_writes_what_json_writes(text):
    body = {
        "model": f"{Template.HOLE}{text}",
        "choices": [{"index": 0, "text": Template.HOLE}],
        "usage": None,
    }
    want = body | {"choices": [{"index": 0, "text": text}]}
    assert Template(body, "delta").event(text).encode() == ServerEvent(want, "delta").encode()


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_short_events_are_those_with_everything_in_them(options):
    """A part with a finish reason takes the long way."""
    head = Head("tiny", bj.Tokenizer.from_checkpoint(open_checkpoint(TINY)), 3, key="k", created=1)
    more = {"stream": True, "stream_options": options, "n": 2}
    for protocol, body, kind in (
        (openai_completions, {"prompt": [1]}, "answer"),
        (openai_chat, {"messages": [{"role": "user", "content": "a"}]}, "answer"),
        (openai_chat, {"messages": [{"role": "user", "content": "a"}]}, "thought"),
    ):
        request = protocol.request(body | more)
        stream = protocol.Stream(request, head)
        for text in TEXTS:
            short, long = (
                [json.loads(event.encode().removeprefix(b"data: ")) for event in stream.next(part)]
                for part in (
                    Part(1, text, [Event(kind, text)], [5]),
                    Part(1, text, [Event(kind, text)], [5], finish_reason="stop"),
                )
            )
            choice, full = short[0]["choices"][0], long[0]["choices"][0]
            assert choice | {"finish_reason": full["finish_reason"]} == full and len(short) == 1
            assert choice["finish_reason"] is None and choice["index"] == 1
            assert {**short[0], "choices": 0} == {**long[0], "choices": 0}


def sent(event: ServerEvent) -> dict:
    return json.loads(event.encode().partition(b"data: ")[2])


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_of_agents_protocols_are_whole_events(text):
    """The second delta of a block or item too, whose numbers are its own."""
    head = Head("tiny", bj.Tokenizer.from_checkpoint(open_checkpoint(TINY)), 3, key="k", created=1)
    parts = [Part(0, "", [Event(kind, "", name), *[Event(kind, text)] * 2], [5]) for kind, name in KINDS]
    message = anthropic_messages.request({"messages": [HI], "max_tokens": 9, "stream": True})
    stream = anthropic_messages.Stream(message, head)
    for index, (part, field) in enumerate(zip(parts, ANTHROPIC, strict=True)):
        deltas = stream.next(part)[-2:]
        body = {"type": "content_block_delta", "index": index, "delta": {"type": field[0], field[1]: text}}
        assert [delta.encode() for delta in deltas] == [ServerEvent(body, body["type"]).encode()] * 2
        RawContentBlockDeltaEvent.model_validate(body, strict=True)
    stream = openai_responses.Stream(openai_responses.request({"input": "a", "stream": True}), head)
    numbers = [body["sequence_number"] for body in map(sent, stream.begin())]
    fields = (PLACE, PLACE | TEXT, {})
    for index, (part, event, more) in enumerate(zip(parts, RESPONSES, fields, strict=True)):
        bodies = [sent(own) for own in stream.next(part)]
        numbers += [body["sequence_number"] for body in bodies]
        for body in bodies[-2:]:
            own = event.model_validate(body, strict=True)
            assert (own.delta, own.output_index, own.item_id) == (text, index, bodies[-1]["item_id"])
            assert body.keys() == {"type", "item_id", "delta", "output_index", "sequence_number", *more}
    assert numbers == [*range(len(numbers))]


def exchange(connection: h11.Connection, version: bytes) -> list[bytes]:
    """What a server sends of a stream, part by part."""
    connection.receive_data(b"POST / HTTP/%b\r\nHost: a\r\nContent-Length: 0\r\n\r\n" % version)
    while type(connection.next_event()) is not h11.EndOfMessage:
        pass
    head = h11.Response(status_code=200, headers=[("content-type", "text/event-stream")])
    parts = [h11.Data(data=data) for data in (b"data: 1\n\n", b"", b"x" * 70000, b"\r\n")]
    return [connection.send(event) or b"" for event in (head, *parts, h11.EndOfMessage())]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_parts_are_framed_as_h11_frames_them(version):
    ours, theirs = (exchange(made(h11.SERVER), version) for made in (Chunked, h11.Connection))
    assert ours == theirs and (b"chunked" in ours[0]) == (version == b"1.1")
    given = Chunked(h11.SERVER)  # a body with a length is not framed
    given.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    given.next_event(), given.next_event()
    given.send(h11.Response(status_code=200, headers=[("content-length", "2")]))
    assert given.send(h11.Data(data=b"ab")) == b"ab"


class Socket(asyncio.Transport):
    """What is written to it; "closed" when it is closed."""

    def __init__(self):
        super().__init__()
        self.writes: list[bytes | str] = []

    def write(self, data) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return "closed" in self.writes

    def close(self) -> None:
        self.writes.append("closed")


def test_what_is_written_in_one_turn_is_sent_together():
    async def main() -> list[bytes | str]:
        socket = Socket()
        corked = Corked(socket, asyncio.get_running_loop())
        for data in (b"head ", b"", b"first"):
            corked.write(data)
        assert not socket.writes
        await asyncio.sleep(0)
        corked.write(large := b"x" * (CORKED + 1))  # at once
        assert socket.writes == [b"head first", large]
        corked.write(b"last ")
        corked.write(b"end")
        corked.close()
        assert corked.is_closing()
        corked.write(b"nobody reads this")
        await asyncio.sleep(0)
        return socket.writes[2:]

    assert asyncio.run(main()) == [b"last end", "closed"]


def test_an_event_loop_is_woken_once_for_all_pieces_of_a_step():
    wakes, count = Wakes(), 0

    async def read(handle: Handle) -> list[str]:
        return [piece.text async for piece in handle]

    async def main() -> list[list[str]]:
        nonlocal count
        loop, handles = asyncio.get_running_loop(), [Handle(1, 3, wakes) for _ in range(8)]
        tasks = [asyncio.ensure_future(read(handle)) for handle in handles]
        await asyncio.sleep(0)
        woken = loop.call_soon_threadsafe

        def counted(*arguments):
            nonlocal count
            count += arguments[0] is setting  # to_thread wakes it, too
            return woken(*arguments)

        loop.call_soon_threadsafe = counted

        def step(*last: str) -> None:
            with wakes.together():
                for handle in handles:
                    handle.add(Piece("a", [1], *last))
                assert count == steps.index(last)  # nobody yet

        steps = [(), ("stop",)]
        for last in steps:
            await asyncio.to_thread(step, *last)
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [["a", "a"]] * 8 and count == 2


def test_a_piece_between_steps_wakes_at_once_and_a_closed_loop_is_left_alone():
    wakes, handle = Wakes(), Handle(1, 3)
    closed = asyncio.new_event_loop()
    closed.close()
    wakes.set(closed, asyncio.Event())
    with wakes.together():
        wakes.set(closed, asyncio.Event())

    async def main() -> str:
        reading = asyncio.ensure_future(anext(aiter(handle)))
        await asyncio.sleep(0)
        await asyncio.to_thread(handle.add, Piece("a", [1]))
        async with asyncio.timeout(10):
            return (await reading).text

    assert asyncio.run(main()) == "a"
