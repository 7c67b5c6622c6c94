"""Where later prompts of a conversation will part ways with this one.

    <|im_start|>system ... <|im_end|>| <|im_start|>user ... <|im_end|>| <|im_start|>assistant <think> Hm.
                                     </think> No. ^ another conversation           ^ the next turn, without
                                     the thought

A chat template may write an answer into the history otherwise than the model wrote it: without its thoughts,
with arguments of calls in another order. So the prompt of the next turn agrees with this one and its answer
up to the beginning of the answer, and after a question's calls of tools up to the first answer after the
question. An engine saves recurrent states there (engine/checkpoints.py). The places are found by rendering
what may come next.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from bonsai_jax.tokens.chat_template import ChatTemplateError
from bonsai_jax.tokens.tokenizer import OPEN, Tokenizer

WINDOW = 4096  # characters before a departure in which a control token is looked for
ANSWER, QUESTION = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Well?"}


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **template: Any,
) -> tuple[list[int], tuple[int, ...]]:
    """Token ids as Tokenizer.encode_chat has them, and the places in them where later prompts depart, in
    order.

    Each place is before a control token, because there texts can be encoded apart. Errors are those of
    Tokenizer.encode_chat.
    """
    text = tokenizer.chat_text(messages, tools=tools, **template)
    ids = tokenizer.encode_chat_text(text)
    first = [message for message in messages[:1] if message.get("role") == "system"]
    places = set()
    for later in ([*first, QUESTION], [*messages, ANSWER], [*messages, ANSWER, QUESTION]):
        try:
            other = tokenizer.chat_text(later, tools=tools, **template | {"add_generation_prompt": False})
        except ChatTemplateError:  # such as of one that wants roles to alternate
            continue
        place = _tokens_before(tokenizer, text, ids, _agree(text, other))
        if place is not None and 0 < place < len(ids):
            places.add(place)
    return ids, tuple(sorted(places))


def _agree(text: str, other: str) -> int:
    """How many characters two texts have in common at their beginnings."""
    most = min(len(text), len(other))
    return bisect.bisect_left(range(1, most + 1), True, key=lambda n: not other.startswith(text[:n]))


def _tokens_before(tokenizer: Tokenizer, text: str, ids: list[int], end: int) -> int | None:
    """How many tokens come before the last control token that begins within the first `end` characters; None:
    there is none near, or the text cannot be encoded apart there."""
    names, first = tokenizer.control_names, max(0, end - WINDOW)
    names_end = end + tokenizer.longest_text  # of one that begins before `end`
    matches = (match.start() for match in names.finditer(text, first, names_end))
    cuts = [at for at in matches if at <= end and text[max(0, at - 1) : at] != OPEN]
    if not cuts:
        return None
    before, after = text[: cuts[-1]], text[cuts[-1] :]
    if len(after) <= len(before):
        rest = tokenizer.encode_chat_text(after)
        return len(ids) - len(rest) if ids[len(ids) - len(rest) :] == rest else None
    beginning = tokenizer.encode_chat_text(before)
    return len(beginning) if ids[: len(beginning)] == beginning else None
