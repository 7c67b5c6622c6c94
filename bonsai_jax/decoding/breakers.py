"""DRY's sequence breakers: texts, as the tokens that end a repetition.

A text such as "\\n" is in many tokens, and a text such as "### Instruction" is cut into tokens in several
ways. As in llama.cpp it is matched by a head, a token that has the text or ends with a part of it, and a
tail, the tokens of the rest:

    "<|end|>"    head "...<|end|>..."  tail nothing      head "...<|"  tail of "end|>"      head "...<" ...

Few tails differ, and few sets of tails that a token can have, so a token has a class, and a class has a set.
"""

import dataclasses
import threading
import weakref
from collections import OrderedDict

import numpy as np
from jaxtyping import Int, UInt8, UInt32

from bonsai_jax.tokens.tokenizer import Tokenizer

CLASSES, TAILS, LONGEST_TAIL = 256, 128, 20
TAIL_WORDS = TAILS // 32
MOST_COMPILED = 64  # of a tokenizer; the oldest go first


@dataclasses.dataclass(frozen=True, eq=False)
class Breakers:
    """The breakers of a request, for the tokens of a model.

    classes   of each token; class 0 has no tails
    heads     bit t % 32 of word t // 32: tokens of the class are heads of tail t
    tails     token ids, padded with -1; tail 0 is that of tokens which have a whole text: nothing
    count     of tails that are used
    """

    classes: UInt8[np.ndarray, "V"]
    heads: UInt32[np.ndarray, "classes words"]
    tails: Int[np.ndarray, "tails longest"]
    count: int


_LOCK = threading.Lock()
_COMPILED: weakref.WeakKeyDictionary[Tokenizer, OrderedDict[tuple, Breakers]] = weakref.WeakKeyDictionary()
_WORDS: weakref.WeakKeyDictionary[Tokenizer, list[bytes]] = weakref.WeakKeyDictionary()


def compiled(texts: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int) -> Breakers:
    """The breakers for a model, made now or before. Any thread may call it.

    Raises ValueError where the texts need more tails or classes than there are.
    """
    with _LOCK:
        own = _COMPILED.setdefault(tokenizer, OrderedDict())
        if (known := own.get((texts, vocab_size))) is not None:
            return known
        if tokenizer not in _WORDS:
            _WORDS[tokenizer] = _words(tokenizer)
    made = _breakers(texts, tokenizer, _WORDS[tokenizer], vocab_size)
    with _LOCK:
        own[texts, vocab_size] = made
        while len(own) > MOST_COMPILED:
            own.popitem(last=False)
    return made


def _words(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token, as the first of a text."""
    words = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    return [word.removeprefix(b" ") for word in words] if tokenizer.space_prefix else words


def _breakers(texts: tuple[str, ...], tokenizer: Tokenizer, words: list[bytes], vocab_size: int) -> Breakers:
    tails: dict[tuple[int, ...], int] = {(): 0}
    own_tails: dict[int, set[int]] = {}  # of each token that has some
    for text in (text.encode() for text in texts):
        numbers = {0: 0} | {
            at: tails.setdefault(tail, len(tails)) for at, tail in _tails(text, tokenizer).items()
        }
        for id, word in enumerate(words[:vocab_size]):
            if text[:1] in word:
                own_tails.setdefault(id, set()).update(
                    numbers[at] for at in _overlaps(word, text) if at in numbers
                )
    sets: dict[frozenset[int], int] = {frozenset(): 0}
    classes = np.zeros(vocab_size, np.int64)
    for id, own in own_tails.items():
        classes[id] = sets.setdefault(frozenset(own), len(sets))
    if len(tails) > TAILS or len(sets) > CLASSES:
        raise ValueError(
            f"SamplingParams: dry_sequence_breakers can be cut in {len(tails)} ways, and {TAILS} fit, with "
            f"{len(sets)} of {CLASSES} kinds of tokens; give fewer texts or shorter ones"
        )
    heads = np.zeros((CLASSES, TAIL_WORDS), np.uint32)
    for own, number in sets.items():
        for tail in own:
            heads[number, tail // 32] |= np.uint32(1 << tail % 32)
    rows = np.full((TAILS, LONGEST_TAIL), -1, np.int32)
    for tail, number in tails.items():
        rows[number, : len(tail)] = tail
    return Breakers(classes.astype(np.uint8), heads, rows, len(tails) if texts else 0)


def _tails(text: bytes, tokenizer: Tokenizer) -> dict[int, tuple[int, ...]]:
    """The tokens of the rest of a text from each character on but the first. A token that ends within a
    character has no rest that could be encoded."""
    rests = {}
    for at in range(1, len(text)):
        if text[at] & 0xC0 != 0x80:  # a character begins
            ids = tokenizer.encode(text[at:].decode(), add_special=False, parse_special=False)
            rests[at] = tuple(ids[:LONGEST_TAIL])
    return rests


def _overlaps(word: bytes, text: bytes) -> list[int]:
    """[0] if the token has the text; else how many bytes of it the token ends with, each number for which it
    does."""
    if text in word:
        return [0]
    return [n for n in range(1, min(len(word), len(text) - 1) + 1) if word.endswith(text[:n])]
