"""A body's bytes to a JSON object, within limits."""

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from bonsai_jax.protocols.errors import RequestError
from bonsai_jax.server.responses import BODIES_FULL, ClientLeft
from bonsai_jax.server.service import Service

MOST_DEPTH = 100  # of lists and objects within each other
LARGE = 2**16  # bytes from which a body is parsed in a thread
BODIES = 16  # times the limit: bytes of all bodies that are arriving
DISCARDED = 4  # times the limit: what is read of a larger body, so that its sender reads the answer


async def json_object(service: Service, request: Request) -> dict[str, Any]:
    """The object in a request's body. Raises RequestError: 413 for too many bytes, 408 where they do not come
    in time, 400 for what is no JSON object. Raises ClientLeft."""
    settings = service.settings
    try:
        async with asyncio.timeout(settings.body_s):
            data = await _bytes(service, request)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {settings.body_s:g} s") from None
    except ClientDisconnect:
        raise ClientLeft from None
    return await service.in_thread(parsed, data) if len(data) > LARGE else parsed(data)


async def _bytes(service: Service, request: Request) -> bytes:
    most, arriving = service.settings.max_body, bytearray()
    too_large = RequestError(413, f"the body has more than {most} bytes, which this server takes at most")
    if int(request.headers.get("content-length", "0")) > DISCARDED * most:
        raise too_large
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > DISCARDED * most:
                raise too_large
            if size <= most:
                arriving += part
                service.body_bytes += len(part)
                if service.body_bytes > BODIES * most:
                    message = "too many large requests are arriving; try later"
                    raise RequestError(429, message, code=BODIES_FULL, retry_after_s=1)
    finally:
        service.body_bytes -= len(arriving)
    if size > most:
        raise too_large
    return bytes(arriving)


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in these bytes. Raises RequestError with status 400."""
    try:
        value = json.loads(data.decode(), parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8, at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError(400, f"the body is not JSON: {error.msg}, {where}") from None
    except RecursionError:
        raise RequestError(400, f"the body's JSON is nested more than {MOST_DEPTH} deep") from None
    except ValueError as error:  # NaN, or a number of too many digits
        raise RequestError(400, f"the body's JSON has a number that cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the body is not a JSON object but a {type(value).__name__}")
    if data.count(b"[") + data.count(b"{") > MOST_DEPTH:  # few bodies; a prompt may have many token ids
        _check_depth(value)
    return value


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise RequestError(400, f"the body's JSON is nested more than {MOST_DEPTH} deep")
