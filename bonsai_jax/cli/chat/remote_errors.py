"""Errors of a server, each in one line and with a remedy."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from bonsai_jax.cli.chat.backend import ServerError

LONGEST = 300  # characters of a server's message


def unreachable(error: Exception, base: str, *, begun: bool = False) -> ServerError:
    """Where no answer came, or the connection broke."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerError(
            f"no server answers at {base} ({_reason(error)}): start one, such as `bonsai-jax serve -m "
            "MODEL`, or give its address as --server http://HOST:PORT"
        )
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"the server at {base} sends nothing; try again, or see its log")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL | UnicodeError):
        return ServerError(f"--server {base}: no address of a server; give http://HOST:PORT")
    stays = "; the text so far stays" if begun else ""
    return ServerError(f"the connection to {base} broke ({_reason(error)}){stays}; is the server running?")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def no_api(url: str) -> ServerError:
    return ServerError(
        f"{url} is not of OpenAI's API: give --server the address up to /v1, such as http://127.0.0.1:8000/v1"
    )


def check(status: int, headers: Mapping[str, str], content: bytes, url: str, key: str | None) -> None:
    """Nothing for status 200. Raises ValueError for a request that the server refuses, which another message
    or setting may change, and ServerError for everything else."""
    if status == 200:
        return
    body = _json(content)
    said = message(body)
    because = f": {said}" if said else ""
    code = f"(status {status})"
    if status in (401, 403):
        remedy = "another --api-key" if key else "--api-key KEY, or set BONSAI_API_KEY"
        verb = "refuses this key" if key else "asks for a key"
        raise ServerError(f"{url} {verb} {code}{because}; give {remedy}")
    if 300 <= status < 400:
        raise ServerError(f"{url} is elsewhere: give --server {headers.get('location', 'its address')}")
    if status in (404, 405) and not said:
        raise no_api(url)
    if status == 429:
        wait = headers.get("retry-after", "")
        when = f"in {wait} s" if wait.isdigit() else "later"
        raise ValueError(f"the server takes no more requests now{because}; try again {when}")
    if 400 <= status < 500:
        remedy = "; /reset begins a new conversation" if _is_full(body) else ""
        raise ValueError(f"the server refuses the request {code}{because or ', without a reason'}{remedy}")
    raise ServerError(f"the server failed {code}{because or ': its log has the reason'}")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _is_full(body: Any) -> bool:
    """Whether the context is: "context_length_exceeded", or llama.cpp's "exceed_context_size_error"."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and "context" in f"{error.get('code')} {error.get('type')}"


def message(body: Any) -> str:
    """What a server says in the body of an error: {"error": {"message": ...}}, {"error": ...},
    {"message": ...} or {"detail": ...}; "" if nothing."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = next((error[name] for name in ("message", "detail") if error.get(name)), None)
    text = error if isinstance(error, str) else "" if error is None else json.dumps(error)
    text = printable(" ".join(text.split()).rstrip("."))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(character for character in text if character.isprintable())
