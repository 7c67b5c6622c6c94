"""A server that speaks OpenAI's API: ours, llama.cpp's, vLLM, Ollama, LM Studio and others."""

import asyncio
import contextlib
import dataclasses
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import httpx

from bonsai_jax.cli.chat import remote_errors
from bonsai_jax.cli.chat.backend import Message, Part, Question, ServerError
from bonsai_jax.cli.chat.received import Received
from bonsai_jax.cli.chat.remote_errors import printable

if TYPE_CHECKING:
    from bonsai_jax import SamplingParams

CONNECT_S = 10.0
LISTING_S = 30.0
SILENT_S = 600.0  # the longest that a server may send nothing: it may read a long prompt, or have a queue

# Fields that OpenAI's own API does not have are left out where they are off.
OFF = {"top_k": 0, "min_p": 0.0}
OTHER_NAMES = {"repetition_penalty": "repeat_penalty"}  # of llama.cpp, Ollama and LM Studio


class Server:
    """Where a server is, and the models that it serves.

    url   http://host:port, with or without /v1; without a scheme it is http
    key   sent as a bearer token
    Raises ServerError if it cannot be asked for its models, and ValueError for a key that cannot be sent.
    """

    def __init__(self, url: str, key: str | None = None):
        full = (url if "://" in url else f"http://{url}").rstrip("/")
        self.base = full if full.endswith("/v1") else f"{full}/v1"
        self.key = key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("--api-key: a key is one line of ASCII characters; is it one?")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.models = self._models()
        self._opened: dict[str, Remote] = {}

    def open(self, name: str | None) -> "Remote":
        """A model of this server; None: the only one. Raises ValueError where there are several, and for one
        that is not among them."""
        shown = printable(", ".join(self.models))
        if name is None and len(self.models) != 1:
            raise ValueError(f"{self.base} serves {shown or 'no model yet'}: choose with --model NAME")
        if name is not None and self.models and name not in self.models:
            raise ValueError(f"{self.base} serves no model {name!r}, but {shown}")
        name = self.models[0] if name is None else name
        return self._opened.setdefault(name, Remote(self, name))

    def _models(self) -> list[str]:
        url = f"{self.base}/models"
        try:
            answer = httpx.get(url, headers=self.headers, timeout=LISTING_S)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise remote_errors.unreachable(error, self.base) from None
        if answer.status_code in (404, 405):
            raise remote_errors.no_api(url)
        remote_errors.check(answer.status_code, answer.headers, answer.content, url, self.key)
        try:
            return [str(model["id"]) for model in answer.json()["data"] or ()]
        except (ValueError, TypeError, KeyError):
            raise remote_errors.no_api(url) from None


class Remote:
    """A model at a server."""

    context = None
    fixed = frozenset({"temperature_first"})

    def __init__(self, server: Server, model: str):
        self.server, self.name = server, model

    @property
    def title(self) -> str:
        return f"{printable(self.name)} at {self.server.base}"

    def answer(self, question: Question) -> "RemoteReply":
        return RemoteReply(self, body(self.name, question))

    def used(self, question: Question) -> int:
        raise ValueError("/tokens needs a model in this process; /stats has what the server counted")

    def warm_up(self, question: Question) -> None:
        """The server has its own ways."""


def body(model: str, question: Question) -> dict[str, Any]:
    """The request for an answer."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": question.with_system(),
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling_fields(question.sampling),
    }
    if question.max_new_tokens >= 0:
        asked["max_tokens"] = question.max_new_tokens
    if question.stop_texts:
        asked["stop"] = list(question.stop_texts)
    if question.ignore_eos:
        asked["ignore_eos"] = True
    if question.think is not None:
        asked["chat_template_kwargs"] = {"enable_thinking": question.think}
    return asked


def sampling_fields(sampling: "SamplingParams") -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    for field in dataclasses.fields(sampling):
        name, value = field.name, getattr(sampling, field.name)
        if name in Remote.fixed or name in fields or value in (OFF.get(name, field.default), None, {}):
            continue
        fields[name] = value
        if name in OTHER_NAMES:
            fields[OTHER_NAMES[name]] = value
    return fields


class RemoteReply:
    """An answer by a server. A thread reads it, so that Ctrl-C can close the connection at any moment; then
    the server stops."""

    dropped, unread = 0, None

    def __init__(self, remote: Remote, body: dict[str, Any]):
        self.received = Received()
        self._server, self._body = remote.server, body
        self._news: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
        self._cancelled = self._complete = False
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._read())
        threading.Thread(target=self._run, name="bonsai-jax chat", daemon=True).start()

    @property
    def text(self) -> str:
        return self.received.text

    @property
    def finish_reason(self) -> str | None:
        return "cancelled" if self._cancelled and not self._complete else self.received.finish_reason

    @property
    def new_tokens(self) -> int | None:
        return self.received.usage.get("completion_tokens")

    @property
    def depth(self) -> int | None:
        return self.received.usage.get("total_tokens")

    @property
    def decode_tok_s(self) -> float | None:
        return self.received.decode_tok_s

    def parts(self) -> Iterator[Part]:
        while (news := self._news.get()) is not None and not self._cancelled:
            if isinstance(news, Exception):
                raise news
            yield from self.received.next(news)
        self._complete = not self._cancelled
        yield from self.received.end()

    def cancel(self) -> None:
        self._cancelled = True
        self._news.put(None)  # a SimpleQueue takes it from a signal handler, too
        with contextlib.suppress(RuntimeError):  # the loop is closed: the answer has ended
            self._loop.call_soon_threadsafe(self._task.cancel)

    def message(self) -> Message:
        return self.received.message()

    def stats(self) -> str:
        return self.received.stats()

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._news.put(None)
            self._loop.close()

    async def _read(self) -> None:
        """Put what the server says into the queue: events, or the reason why there are no more."""
        server = self._server
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
        try:
            async with (
                httpx.AsyncClient(headers=server.headers, timeout=timeout) as client,
                client.stream("POST", f"{server.base}/chat/completions", json=self._body) as answer,
            ):
                async for event in events(answer, server):
                    self._news.put(event)
        except httpx.HTTPError as error:
            self._news.put(remote_errors.unreachable(error, server.base, begun=bool(self.received.text)))
        except (ValueError, ServerError) as error:
            self._news.put(error)


async def events(answer: httpx.Response, server: Server) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events. Raises ValueError or ServerError for an answer that is an error, or has
    one among its events, or that ends before its end."""
    if answer.status_code != 200:
        await answer.aread()
        url = str(answer.url)
        remote_errors.check(answer.status_code, answer.headers, answer.content, url, server.key)
    ended = False
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not data:
            continue
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise ServerError(f"{server.base} sent an event that is not JSON: {data[:60]!r}") from None
        if not isinstance(event, dict) or "error" in event:
            raise ServerError(f"the server broke the answer off: {remote_errors.message(event)}")
        ended = ended or any(choice.get("finish_reason") for choice in event.get("choices") or ())
        yield event
    if not ended:  # some say [DONE], and some do not
        raise ServerError(f"{server.base} ended before its answer did; is the server running?")
