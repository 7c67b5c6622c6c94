"""A Request's answer: submitted to the engine, and written by its protocol, whole or as events."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from bonsai_jax.engine import Handle
from bonsai_jax.engine.answers import Piece, output
from bonsai_jax.protocols.answers import Echo, Head, Parser, Part, ServerEvent, Timings, Usage, answer
from bonsai_jax.protocols.errors import FieldError, RequestError
from bonsai_jax.protocols.fields import MOST_LOGPROBS
from bonsai_jax.protocols.request import Request
from bonsai_jax.protocols.submit import Submission, adapter_name, submissions, submitted
from bonsai_jax.research.prompt_logprobs import prompt_logprobs
from bonsai_jax.research.reading import Reader
from bonsai_jax.server.service import Service

SHORT = 1024  # characters, or token ids, that are encoded at once
LONGEST_REASON = 200  # characters of the engine's that a client gets

log = logging.getLogger(__name__)


class Answering:
    """One request being answered.

    protocol   the module that read it (bonsai_jax/protocols)
    owner      of Engine.submit
    usage      of what is written so far

    `whole()` or `events()` does it all, once. Whoever cancels them cancels the answers in the engine.
    """

    def __init__(self, service: Service, protocol: Any, request: Request, owner: str):
        self.service, self.protocol, self.request, self.owner = service, protocol, request, owner
        self._submissions: list[Submission] = []
        self._echoes: list[Echo | None] = []
        self._handles: list[Handle | None] = []  # None: an echo without an answer
        self._over = self._expired = False
        self._began = self._first = self._last = 0.0
        self._new_tokens = self._cached_tokens = 0

    @property
    def usage(self) -> Usage:
        timings = Timings(self._first - self._began, self._last - self._first) if self._first else None
        return Usage(self._prompt_tokens, self._new_tokens, self._cached_tokens, timings)

    async def whole(self) -> dict[str, Any]:
        """The body of the answer. Raises RequestError."""
        tokenizer, answers = self.service.model.tokenizer, []
        async with self._running():
            for one, echo, handle in zip(self._submissions, self._echoes, self._handles, strict=True):
                pieces: list[list[Piece]] = [[] for _ in range(self.request.n)]
                async for piece in self._pieces(handle):
                    pieces[piece.index].append(piece)
                for own in pieces:
                    written = output(own, len(one.ids))
                    answers.append(answer(self.request, tokenizer, one.ids, written, echo))
        return self.protocol.whole(self.request, answers, self._head, self.usage)

    async def events(self) -> AsyncGenerator[list[ServerEvent]]:
        """The answer's events, as it comes; those of a list are sent together. Raises RequestError before the
        first of them; later an event tells of it."""
        stream = None
        try:
            async with contextlib.aclosing(self._parts()) as parts:
                async for part in parts:
                    begin = []
                    if stream is None:  # errors before the first token have a status of their own
                        stream = self.protocol.Stream(self.request, self._head)
                        begin = stream.begin()
                    yield [*begin, *stream.next(part)]
            assert stream is not None  # every answer has a last part
            yield stream.end(self.usage)
        except Exception as error:
            if stream is None:
                raise
            failure = error
            if not isinstance(error, RequestError):
                log.exception("a stream failed")
                failure = RequestError(500, "the server failed while it wrote this answer")
            yield stream.failed(failure)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(one.ids) for one in self._submissions)

    @property
    def _head(self) -> Head:
        name = self._adapter or self.service.settings.name
        return Head(name, self.service.model.tokenizer, self._prompt_tokens, self._cached_tokens)

    @property
    def _adapter(self) -> str | None:
        return adapter_name(self.service.engine, self.request)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """The request, admitted and submitted. At the end, and after timeout_s, all its answers are
        cancelled, which does nothing to complete ones."""
        service = self.service
        with service.admitted(len(self.request.prompts) * self.request.n):
            timer = asyncio.get_running_loop().call_later(service.settings.timeout_s, self._expire)
            try:
                if self.request.echo:
                    await service.in_thread(self._encode)
                    await service.read(self._read_prompts)
                    await service.in_thread(self._submit)
                else:
                    with service.engine.arriving():
                        if self._is_short:
                            await asyncio.sleep(0)  # others of this turn of the event loop are arriving, too
                            self._encode_and_submit()
                        else:
                            await service.in_thread(self._encode_and_submit)
                yield
            except RuntimeError as error:  # the engine's
                raise _reason(error) from error
            finally:
                timer.cancel()
                self._cancel()

    def _encode(self) -> None:
        """In a thread: it may take seconds."""
        if self._adapter is not None and self.request.echo and self.request.logprobs is not None:
            reason = f"with logprobs and the adapter {self._adapter!r} is not supported; leave one out"
            raise FieldError("echo", reason)
        self._submissions = submissions(self.request, self.service.model, self.service.defaults)
        self.service.metrics.prompt_tokens.inc(self._prompt_tokens)
        self._echoes = [None] * len(self._submissions)

    def _read_prompts(self, reader: Reader) -> None:
        """In a thread: prompts at the beginning of their answers, with log-probabilities if asked for."""
        request, tokenizer = self.request, self.service.model.tokenizer
        every = [one.ids for one in self._submissions]
        scores: list[Any] = [None] * len(every)
        if request.logprobs is not None:
            n = request.logprobs
            most = 1 if n <= 1 else MOST_LOGPROBS  # a program is compiled for each number
            scores = [
                own.replace(ids=own.ids[:, :n], top=own.top[:, :n])
                for own in prompt_logprobs(reader, every, most)
            ]
        for number, (prompt, ids) in enumerate(zip(request.prompts, every, strict=True)):
            text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
            self._echoes[number] = Echo(text, ids, scores[number])

    def _submit(self) -> None:
        self._began = time.perf_counter()
        for one in self._submissions:
            handle = submitted(self.service.engine, self.request, one, self.owner)
            self._handles.append(handle)
            if self._over and handle is not None:  # `_cancel` may not have seen it
                handle.cancel()

    @property
    def _is_short(self) -> bool:
        """Whether a change of threads would take longer than to encode the prompts. Templates of chats and
        constraints may take any time."""
        asked = self.request
        return not asked.chat and asked.constraint is None and sum(map(len, asked.prompts)) <= SHORT

    def _encode_and_submit(self) -> None:
        self._encode()
        self._submit()

    def _expire(self) -> None:
        self._expired = True
        self._cancel()

    def _cancel(self) -> None:
        self._over = True
        for handle in list(self._handles):
            if handle is not None:
                handle.cancel()

    async def _parts(self) -> AsyncGenerator[Part]:
        """Parts of all answers, prompt by prompt; those of one prompt's answers as they come."""
        n, tokenizer = self.request.n, self.service.model.tokenizer
        async with self._running():
            for prompt, handle in enumerate(self._handles):
                ids, echoes = self._submissions[prompt].ids, [self._echoes[prompt]] * n
                parsers = [Parser(self.request, tokenizer, ids, prompt * n + i) for i in range(n)]
                async with contextlib.aclosing(self._pieces(handle)) as pieces:
                    async for piece in pieces:
                        echo, echoes[piece.index] = echoes[piece.index], None
                        yield parsers[piece.index].next(piece, echo)

    async def _pieces(self, handle: Handle | None) -> AsyncGenerator[Piece]:
        """A handle's pieces, counted. Raises RequestError if the time is over before a first token."""
        if handle is None:
            for index in range(self.request.n):
                yield Piece("", [], "length", index=index)
            return
        async with contextlib.aclosing(aiter(handle)) as pieces:
            async for piece in pieces:
                self._count(piece)
                yield piece

    def _count(self, piece: Piece) -> None:
        now, tokens, metrics = time.perf_counter(), len(piece.tokens), self.service.metrics
        if self._expired and not tokens and not self._first:
            waited = f"{self.service.settings.timeout_s:g} s"
            raise RequestError(503, f"no token was written within {waited}", code="timeout", retry_after_s=10)
        if tokens and not self._first:
            self._first = now
            metrics.first_token(now - self._began)
        elif tokens:
            metrics.more_tokens(now - self._last, tokens)
        if tokens:
            self._last = now
        self._new_tokens += tokens
        self._cached_tokens += piece.cached_tokens if piece.index == 0 else 0
        metrics.count(piece)


def _reason(error: RuntimeError) -> RequestError:
    """The engine's error: of this request, of which no token could be drawn, or of a dispatch that failed."""
    if isinstance(error.__cause__, ValueError):
        return RequestError(400, str(error))
    log.error("%s", error)
    return RequestError(500, str(error).partition("\n")[0][:LONGEST_REASON])  # XLA's may have many lines
