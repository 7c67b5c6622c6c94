"""Whether an answer begins with a thought, as its prompt and the chat template show."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bonsai_jax.tokens.calls.grammar import CLOSE, OPEN, Thought

if TYPE_CHECKING:
    from bonsai_jax.tokens.tokenizer import Tokenizer

MOST = 64  # tokens at the end of a prompt that are looked at


def first_thought(tokenizer: "Tokenizer", prompt_ids: Sequence[int], thinks: bool = True) -> Thought:
    """What comes before the answer itself.

    thinks  False: thinking is switched off, so there is no thought unless the prompt has begun one
    A prompt that does not end as the chat template ends it is no chat, and has no thought.
    """
    text = tokenizer.decode(prompt_ids[-MOST:], skip_special=False)
    if tokenizer.writes_harmony:
        _, start, last = text.rpartition("<|start|>")
        header, message, _ = last.partition("<|message|>")
        if not start or "<|end|>" in last:
            return "none"
        if not message:
            return "none" if header.strip() != "assistant" else "possible" if thinks else "header"
        return "begun" if header.partition("<|channel|>")[2].strip() == "analysis" else "none"
    if text.rstrip().endswith(OPEN):
        return "begun"
    opening = tokenizer.answers_begin
    thoughtful = thinks and bool(opening) and CLOSE in (tokenizer.chat_template or "")
    return "possible" if thoughtful and text.endswith(opening) else "none"
