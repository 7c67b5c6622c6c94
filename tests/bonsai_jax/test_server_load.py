"""Mixed load on one server for LOAD_MINUTES (1): right answers, every page back, memory flat.

LOAD_MINUTES=60 uv run pytest -m slow tests/bonsai_jax/test_server_load.py
"""

import asyncio
import base64
import collections
import contextlib
import gc
import json
import os
import random
import time
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import machine
from tests.bonsai_jax.command_line import GREEDY, TINY
from tests.bonsai_jax.serving import Served, serving

MINUTES = float(os.environ.get("LOAD_MINUTES", "1"))
# Of the same load, before memory counts: every shape that a crowd makes is compiled.
WARM_S = max(20.0, MINUTES * 3)
GROWS = 16 * 2**20  # bytes at most, of what is in use when nothing runs
CLIENTS, NEW = 12, 16
# Few texts, of four lengths: embeddings and echoes compile a program for each power of two.
TEXTS = ["Hi", "Once upon a time", "What is a bonsai, and how old can it get?", "a b c d e f g h i " * 6]
SCHEMA = {"enum": ["a bonsai", "a pine", {"age": 300}]}
FORM = {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA}}
BROKEN = [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b'{"prompt": "a", "max_tokens": "x"}']


def memory() -> int:
    """Bytes of this process that are in memory, and in use: what malloc keeps for later is given back."""
    gc.collect()
    machine.release_memory()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Expected:
    """What `generate`, alone, answers."""

    def __init__(self, model: bj.Model):
        how = {"max_new_tokens": NEW, "sampling": GREEDY}
        turns = [[{"role": "user", "content": text}] for text in TEXTS]
        self.chats = bj.generate(model, [model.tokenizer.encode_chat(turn) for turn in turns], **how)
        self.texts = bj.generate(model, TEXTS, **how)
        self.forms = bj.generate(model, TEXTS, constraint=bj.json_schema(SCHEMA), **how)
        self.vectors = bj.embed_texts(model, TEXTS)
        self.lengths = [len(model.tokenizer.encode(text)) for text in TEXTS]


class Crowd:
    """Clients that ask until a moment; `done` counts what they asked for."""

    def __init__(self, served: Served, expected: Expected):
        self.served, self.expected = served, expected
        self.done: collections.Counter[str] = collections.Counter()

    async def run(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=CLIENTS)
        async with (
            asyncio.timeout(seconds + 120),
            httpx.AsyncClient(base_url=self.served.url, timeout=60, limits=limits) as http,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(CLIENTS):
                clients.create_task(self.client(http, random.Random(number), ends))

    async def client(self, http: httpx.AsyncClient, draw: random.Random, ends: float) -> None:
        kinds = [
            self.chat,
            self.stream,
            self.text,
            self.form,
            self.vector,
            self.echo,
            self.leave,
            self.broken,
        ]
        while time.monotonic() < ends:
            kind, which = draw.choice(kinds), draw.randrange(len(TEXTS))
            await kind(http, which)
            self.done[kind.__name__] += 1

    async def post(self, http: httpx.AsyncClient, path: str, **body) -> dict:
        answer = await http.post(path, json={"temperature": 0, "max_tokens": NEW, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, http: httpx.AsyncClient, which: int) -> None:
        body = await self.post(http, "/v1/chat/completions", **self.turn(which))
        assert body["choices"][0]["message"]["content"] == self.expected.chats[which].text

    async def stream(self, http: httpx.AsyncClient, which: int) -> None:
        text = ""
        async with self.streamed(http, "/v1/chat/completions", **self.turn(which)) as lines:
            async for line in lines:
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        assert text == self.expected.chats[which].text

    async def text(self, http: httpx.AsyncClient, which: int) -> None:
        body = await self.post(http, "/v1/completions", prompt=TEXTS[which], n=2)
        assert [one["text"] for one in body["choices"]] == [self.expected.texts[which].text] * 2

    async def form(self, http: httpx.AsyncClient, which: int) -> None:
        body = await self.post(http, "/v1/completions", prompt=TEXTS[which], response_format=FORM)
        assert body["choices"][0]["text"] == self.expected.forms[which].text

    async def vector(self, http: httpx.AsyncClient, which: int) -> None:
        body = await self.post(http, "/v1/embeddings", input=TEXTS[: which + 1], encoding_format="base64")
        got = [np.frombuffer(base64.b64decode(one["embedding"]), np.float32) for one in body["data"]]
        np.testing.assert_allclose(got, self.expected.vectors[: which + 1], atol=1e-4)

    async def echo(self, http: httpx.AsyncClient, which: int) -> None:
        how = {"echo": True, "logprobs": which, "max_tokens": 1}
        body = await self.post(http, "/v1/completions", prompt=TEXTS[which], **how)
        (choice,) = body["choices"]
        assert choice["text"].startswith(TEXTS[which])
        assert len(choice["logprobs"]["token_logprobs"]) >= self.expected.lengths[which]

    async def leave(self, http: httpx.AsyncClient, which: int) -> None:
        """After the first event, or before it."""
        how = {"prompt": TEXTS[which], "max_tokens": 100, "ignore_eos": True}
        async with self.streamed(http, "/v1/completions", **how) as lines:
            if which % 2:
                await anext(lines)

    async def broken(self, http: httpx.AsyncClient, which: int) -> None:
        """A body that is wrong, and one of which half comes."""
        for wrong in BROKEN[which : which + 2]:
            answer = await http.post("/v1/completions", content=wrong)
            assert answer.status_code == 400 and answer.json()["error"]["message"]
        place = urlsplit(self.served.url)
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        writer.write((head + b'{"prompt": ')[: -7 * which or None])
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def streamed(self, http: httpx.AsyncClient, path: str, **body):
        body = {"temperature": 0, "max_tokens": NEW, "stream": True, **body}
        async with http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            yield answer.aiter_lines()

    def turn(self, which: int) -> dict:
        return {"messages": [{"role": "user", "content": TEXTS[which]}]}


@pytest.mark.slow
def test_under_a_mixed_load_answers_are_right_pages_come_back_and_memory_is_flat():
    model = bj.load(TINY, bj.RunConfig(context=256, batch_size=4))
    expected = Expected(model)
    with serving(model, rows=8) as served:
        served.service.engine.warmup(constraints=True)
        crowd = Crowd(served, expected)
        asyncio.run(crowd.run(WARM_S))
        served.idle(60)
        first = memory()
        asyncio.run(crowd.run(MINUTES * 60))
        served.idle(60)
        last = memory()
    print(
        f"{sum(crowd.done.values())} requests: {dict(crowd.done)}; {first / 1e6:.1f} to {last / 1e6:.1f} MB"
    )
    assert len(crowd.done) == 8 and min(crowd.done.values()) >= 3, crowd.done
    assert last - first < GROWS, (first, last)
