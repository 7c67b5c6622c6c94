"""Replicas of a server on Ray Serve, on the GPUs of a cluster or the CPUs of its nodes (docs/deploy.md).

    pip install "dist/bonsai_jax-0.1.0-py3-none-any.whl[serve,cuda13]" "ray[serve]>=2.60"
    serve run deploy.ray_serve:build model=model.gguf replicas=4 gpus=1

    HTTP -> Ray's proxy -> Door --Asked--> a Replica: an Engine and the app of `bonsai-jax serve`
                                <-ASGI messages-

Ray chooses the replica: the one that has read the longest beginning of the prompt, or, if others have much
less to do, one of these. If a replica dies, requests that it has not begun to answer are sent to another one,
and Ray starts a new one.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
from ray import serve
from ray.exceptions import RayActorError

# The class of ray.serve.llm.request_router, which can be imported only where vLLM is installed.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

SPARE = 64  # requests beyond a replica's queue, which it refuses itself, as `bonsai-jax serve` does
KEYS = "BONSAI_JAX_API_KEYS"  # environment variable, as of `bonsai-jax serve`
TRIES = 3  # replicas that may die while they have a request, before it fails
TREE_CHARACTERS = 4_000_000  # of prompts that Ray remembers
# What stands at the beginning of a prompt, in order, in the bodies of the APIs.
HEAD = ("tools", "system", "instructions", "messages", "input", "prompt")


class Arguments(pydantic.BaseModel, extra="forbid"):
    """What `serve run deploy.ray_serve:build NAME=VALUE ...` takes.

    model      as for `bonsai-jax serve -m`
    replicas   copies of the model
    gpus       of each replica, over which its weights are split; 0: it runs on a CPU
    cpus       of each replica
    context, batch_size, max_queue, max_body, timeout   as for `bonsai-jax serve`
    keys_file  a file with a key on each line; keys are also in the variable BONSAI_JAX_API_KEYS
    warmup     compile every program before a replica takes requests
    """

    model: str = "demo"
    replicas: int = pydantic.Field(2, ge=1)
    gpus: int = pydantic.Field(0, ge=0)
    cpus: float = pydantic.Field(1, gt=0)
    context: int = pydantic.Field(4096, ge=1)
    batch_size: int = pydantic.Field(16, ge=1)
    max_queue: int = pydantic.Field(256, ge=0)
    max_body: int = pydantic.Field(16, ge=1)
    timeout: float = pydantic.Field(600, gt=0)
    keys_file: Path | None = None
    warmup: bool = True

    def keys(self) -> tuple[str, ...]:
        lines = os.environ.get(KEYS, "").split(",")
        if self.keys_file is not None:
            lines += self.keys_file.read_text().splitlines()
        keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
        if self.keys_file is not None and not keys:
            raise ValueError(f"{self.keys_file} has no key")
        return keys


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, as Door sends it to a Replica. prompt: what Ray's router compares."""

    scope: dict[str, Any]
    body: bytes
    prompt: str


@serve.deployment
class Replica:
    """An engine, and the app of `bonsai-jax serve` around it."""

    def __init__(self, given: Arguments, keys: tuple[str, ...]):
        import bonsai_jax as bj
        from bonsai_jax.protocols import fields
        from bonsai_jax.server.app import app
        from bonsai_jax.server.service import Service
        from bonsai_jax.server.settings import MEGABYTE, Settings

        run = bj.RunConfig(context=given.context, batch_size=given.batch_size)
        mesh = bj.make_mesh(1, given.gpus) if given.gpus > 1 else None
        model = bj.load(given.model, run, mesh=mesh)
        engine = bj.Engine(
            model, max_batch_size=given.batch_size, logprobs=fields.MOST_LOGPROBS, logit_biases=32
        )
        if given.warmup:
            engine.warmup()
            engine.compile_constrained()
        settings = Settings(
            name=model.name, keys=keys, max_queue=given.max_queue, timeout_s=given.timeout,
            max_body=given.max_body * MEGABYTE,
        )  # fmt: skip
        self._service = Service(engine, settings)
        self._service.ready = True
        self._app = app(self._service)

    async def answer(self, asked: Asked) -> AsyncGenerator[dict[str, Any]]:
        """The app's ASGI messages. Whoever closes the generator has left."""
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=16)
        body = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            return await asyncio.Future()  # until the app is cancelled

        work = asyncio.ensure_future(self._app({**asked.scope, "state": {}}, receive, sent.put))
        try:
            while True:
                message = asyncio.ensure_future(sent.get())
                await asyncio.wait({message, work}, return_when=asyncio.FIRST_COMPLETED)
                if not message.done():
                    message.cancel()
                    await work  # it has failed
                    return
                own = message.result()
                yield own
                if own["type"] == "http.response.body" and not own.get("more_body", False):
                    return
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has failed."""
        if self._service.engine.broken is not None:
            raise RuntimeError(f"the engine has failed: {self._service.engine.broken}")

    def __del__(self):
        with contextlib.suppress(AttributeError):  # the model could not be loaded
            self._service.close()


@serve.deployment
class Door:
    """Passes requests on to replicas, and their answers back."""

    def __init__(self, replicas: DeploymentHandle, max_body: int):
        from bonsai_jax.protocols import openai
        from bonsai_jax.protocols.errors import RequestError
        from bonsai_jax.server.app import ERRORS
        from bonsai_jax.server.responses import error_response

        def failure(path: str, status: int, message: str, **more: Any) -> Response:
            """An error in the form of the path's protocol."""
            return error_response(ERRORS.get(path, openai), RequestError(status, message, **more))

        self._failure = failure
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body = max_body

    async def __call__(self, request: Request) -> Response:
        body, path = bytearray(), request.url.path
        try:
            async for part in request.stream():
                body += part
                if len(body) > self._max_body:
                    return self._failure(path, 413, f"the body has more than {self._max_body} bytes")
        except ClientDisconnect:
            return Response(status_code=499)
        names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")
        scope = {name: request.scope.get(name) for name in (*names, "headers", "client", "server")}
        asked = Asked(scope | {"root_path": ""}, bytes(body), prompt(path, body))
        for _ in range(TRIES):
            messages = aiter(self._replicas.remote(asked))
            try:
                start, first = await anext(messages), await anext(messages)
            except BackPressureError:  # where a file of settings limits Ray's own queue
                message = "all replicas have as many requests as they take; try later"
                return self._failure(path, 429, message, code="queue_full", retry_after_s=1)
            except RayServeException as error:
                return self._failure(path, 503, str(error).partition("\n")[0], retry_after_s=10)
            except RayActorError:  # the replica has died, before it has answered anything
                continue
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            return StreamingResponse(bodies(first, messages), start["status"], headers)
        message = f"{TRIES} replicas died while they had this request"
        return self._failure(path, 503, message, retry_after_s=10)


async def bodies(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    yield first["body"]
    async for message in rest:
        yield message["body"]


def prompt(path: str, body: bytes | bytearray) -> str:
    """What requests that begin alike have in common; the path if there is no prompt."""
    try:
        given = json.loads(body)
        return json.dumps([given[name] for name in HEAD if name in given])
    except (ValueError, TypeError, RecursionError):
        return path


def build(given: Arguments) -> serve.Application:
    """The application for `serve run` and `serve.run`."""
    router = RequestRouterConfig(
        request_router_class=PrefixCacheAffinityRouter,
        request_router_kwargs={
            "imbalanced_threshold": given.batch_size,
            "do_eviction": True,
            "eviction_threshold_chars": TREE_CHARACTERS,
            "eviction_target_chars": TREE_CHARACTERS * 9 // 10,
        },
    )
    most = given.batch_size + given.max_queue + SPARE
    replicas = Replica.options(
        num_replicas=given.replicas,
        max_ongoing_requests=most,
        ray_actor_options={"num_cpus": given.cpus, "num_gpus": given.gpus},
        request_router_config=router,
    ).bind(given, given.keys())
    door = Door.options(max_ongoing_requests=most * given.replicas, ray_actor_options={"num_cpus": 0})
    return door.bind(replicas, given.max_body * 2**20)
