"""Conversations as most chat templates take them: one message for the system, and it comes first."""

from collections.abc import Sequence
from typing import Any

SYSTEM = ("system", "developer")


def with_system(first: Sequence[str], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, and before them one for the system: the texts `first`, and those of the system's and
    developers' messages at the beginning. Later ones are the user's, because many templates refuse them."""
    texts, rest = [text for text in first if text], list(messages)
    while rest and rest[0]["role"] in SYSTEM:
        texts.append(rest.pop(0)["content"])
    rest = [message | {"role": "user"} if message["role"] in SYSTEM else message for message in rest]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest
