"""Tokenizers from GGUF metadata, with llama.cpp's ids: byte-level BPE, SentencePiece-style BPE, and Gemma 4's
BPE over raw text."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bonsai_jax.tokens.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from bonsai_jax.tokens.vocabulary import (
    BYTE,
    BYTE_ALPHABET,
    BYTE_TOKEN,
    CONTROL,
    END_TEXTS,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    marks,
)

_LONGEST_PIECE = 1024  # characters; tokens of real vocabularies have at most a few hundred

# A token of one of these names, or of END_TEXTS, is a control token whatever the file says, as in llama.cpp.
# Files of Qwen say that "</s>" is a normal one.
_FILL_TEXTS = (  # noqa: SIM905
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> "
    "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID>"
).split()


def backend(vocabulary: Vocabulary) -> Any:
    """The tokenizers.Tokenizer of a vocabulary that `build` made, without control tokens."""
    encoder: Any = vocabulary.encoder
    return encoder.encode_plain.backend


def build(metadata: Mapping[str, Any]) -> Vocabulary:
    """See Tokenizer.from_gguf."""
    tokens = _Tokens.read(metadata)
    kind = _value(metadata, "tokenizer.ggml.model", str)
    if kind == "gpt2":
        return _byte_level_bpe(metadata, tokens)
    if kind == "llama":
        return _sentencepiece_bpe(metadata, tokens)
    if kind == "gemma4":
        return _raw_bpe(metadata, tokens)
    raise NotImplementedError(
        f"tokenizer.ggml.model = {kind[:80]!r} is not supported; supported: 'gpt2', 'llama', 'gemma4'"
    )


def _value(metadata: Mapping[str, Any], key: str, kind: type, default: Any = ...) -> Any:
    """metadata[key] as `kind`; ValueError if it has another type, or is missing without a default."""
    value = metadata.get(key, default)
    if value is ...:
        raise ValueError(f"{key} is missing: the file has no usable tokenizer")
    if value is default:
        return default
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{key} = {str(value)[:80]!r}: expected {kind.__name__}")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _value(metadata, key, list)
    if bad := set(map(type, values)) - {str}:
        raise ValueError(f"{key} has entries of type {bad.pop().__name__}, expected strings")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int, default: float | None) -> np.ndarray:
    """metadata[key] as an array of `count` numbers, all `default` if the key is missing."""
    if default is not None and key not in metadata:
        return np.full(count, default)
    try:
        values = np.asarray(_value(metadata, key, object))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ValueError(f"{key}: expected a list of numbers, not {values.dtype} of shape {values.shape}")
    if len(values) != count:
        raise ValueError(f"{key} has {len(values)} entries, but tokenizer.ggml.tokens has {count}")
    return values


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The tokens of a GGUF file, for both kinds of tokenizer.

    texts    by id
    kinds    by id, as in Vocabulary
    ids      {text: id}
    bpe_ids  the same without control tokens, so that BPE cannot make one from plain text
    """

    texts: list[str]
    kinds: bytes
    ids: dict[str, int]
    bpe_ids: dict[str, int]

    @staticmethod
    def read(metadata: Mapping[str, Any]) -> "_Tokens":
        texts = _strings(metadata, "tokenizer.ggml.tokens")
        if not texts:
            raise ValueError("tokenizer.ggml.tokens is empty")
        kinds = _numbers(metadata, "tokenizer.ggml.token_type", len(texts), default=NORMAL)
        bad = np.flatnonzero(~np.isin(kinds, (0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)))
        if bad.size:
            raise ValueError(f"tokenizer.ggml.token_type[{bad[0]}] = {kinds[bad[0]]}: expected 1 to 6")
        kinds = bytearray(np.where(kinds == 0, UNUSED, kinds).astype(np.uint8).tobytes())
        if "" in texts:
            kinds = bytearray(kind if text else UNUSED for text, kind in zip(texts, kinds, strict=True))
            texts = [text or f"[EMPTY_{id}]" for id, text in enumerate(texts)]
        ids = dict(zip(texts, range(len(texts)), strict=True))
        if len(ids) != len(texts):
            id = next(id for id, text in enumerate(texts) if ids[text] != id)
            raise ValueError(f"tokenizer.ggml.tokens: {texts[id][:80]!r} is both {id} and {ids[texts[id]]}")
        ends = [text for text in END_TEXTS if text not in marks(ids)]
        for text in ends + _FILL_TEXTS:
            if text in ids and kinds[ids[text]] in (NORMAL, USER_DEFINED, UNUSED):
                kinds[ids[text]] = CONTROL
        bpe_ids = dict(ids)
        for id in np.flatnonzero(np.frombuffer(kinds, np.uint8) == CONTROL):
            del bpe_ids[texts[id]]
        return _Tokens(texts, bytes(kinds), ids, bpe_ids)

    def special_id(self, metadata: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = _value(metadata, key, int, None)
        if id is None:
            return default if default is not None and default < len(self.texts) else None
        if not 0 <= id < len(self.texts):
            raise ValueError(f"{key} = {id}, but there are {len(self.texts)} tokens")
        return id

    def vocabulary(
        self,
        metadata: Mapping[str, Any],
        *,
        encode_plain: Callable[[str, bool], list[int]],
        bos_id: int | None,
        eos_id: int | None,
        add_bos: bool,
        **fields: Any,
    ) -> Vocabulary:
        """The Vocabulary. encode_plain encodes text without special tokens: (text, follows_special) ->
        ids."""
        add_bos = _value(metadata, "tokenizer.ggml.add_bos_token", bool, add_bos)
        add_eos = _value(metadata, "tokenizer.ggml.add_eos_token", bool, False)
        for name, add, id in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
            if add and id is None:
                raise ValueError(
                    f"tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{name}_token_id is not"
                )
        ends = {eos_id, *(self.special_id(metadata, name) for name in ("eot", "eom"))}
        ends |= {
            self.ids[text] for text in END_TEXTS if text in self.ids and self.kinds[self.ids[text]] == CONTROL
        }
        ends -= {self.ids[text] for text in marks(self.ids)}
        template = _value(metadata, "tokenizer.chat_template", str, None)
        return Vocabulary(
            texts=self.texts,
            kinds=self.kinds,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=frozenset(id for id in ends if id is not None),
            pad_id=self.special_id(metadata, "padding"),
            add_bos=add_bos,
            add_eos=add_eos,
            chat_template=template,
            encoder=self._encoder(encode_plain),
            **fields,
        )

    def _encoder(self, encode_plain: Callable[[str, bool], list[int]]) -> Callable[[str, bool], list[int]]:
        """Finds special tokens in a text, longest first as llama.cpp does, and encodes the text between
        them."""
        special = [id for id, kind in enumerate(self.kinds) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
        special.sort(key=lambda id: -len(self.texts[id].encode()))
        user_defined = [id for id in special if self.kinds[id] == USER_DEFINED]
        named = [(self.texts[id], id) for id in special], [(self.texts[id], id) for id in user_defined]
        return _Encoder(*named, encode_plain)


# Encoders are objects, because a function inside a function cannot be pickled.


@dataclasses.dataclass(frozen=True, eq=False)
class _Encoder:
    """Vocabulary.encoder of a GGUF file.

    special, user_defined   (text, id) of the tokens to look for in a text, with parse_special and without
    encode_plain            encodes the text between them
    """

    special: list[tuple[str, int]]
    user_defined: list[tuple[str, int]]
    encode_plain: Callable[[str, bool], list[int]]

    def __call__(self, text: str, parse_special: bool) -> list[int]:
        parts: list[str | int] = [text] if text else []
        for name, id in self.special if parse_special else self.user_defined:
            if name in text:
                parts = [piece for part in parts for piece in _cut(part, name, id)]
        ids, follows_special = [], True
        for part in parts:
            ids += [part] if isinstance(part, int) else self.encode_plain(part, follows_special)
            follows_special = isinstance(part, int)
        return ids


@dataclasses.dataclass(frozen=True, eq=False)
class _ByteLevel:
    """encode_plain of byte-level BPE. below: ids from here on stand for bytes without a token; None: all
    bytes have one."""

    backend: Any
    below: int | None

    def __call__(self, text: str, follows_special: bool) -> list[int]:
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return ids if self.below is None else [id for id in ids if id < self.below]


@dataclasses.dataclass(frozen=True, eq=False)
class _SentencePiece:
    """encode_plain of a "llama" vocabulary."""

    backend: Any
    space_prefix: bool

    def __call__(self, text: str, follows_special: bool) -> list[int]:
        text = " " + text if self.space_prefix and follows_special else text
        return self.backend.encode(text.replace(" ", SPACE), add_special_tokens=False).ids


@dataclasses.dataclass(frozen=True, eq=False)
class _Raw:
    """encode_plain of a "gemma4" vocabulary. ids: of runs of line breaks that are a token."""

    backend: Any
    ids: dict[str, int]

    def __call__(self, text: str, follows_special: bool) -> list[int]:
        ids = []
        for line in re.findall(r"\n+|[^\n]+", text.replace(" ", SPACE)):
            whole = self.ids.get(line)
            ids += [whole] if whole is not None else self.backend.encode(line, add_special_tokens=False).ids
        return ids


def _cut(part: str | int, mark: str, id: int) -> list[str | int]:
    """A text cut at every `mark`, with `id` in its place and without empty pieces; an id is returned as it
    is."""
    if isinstance(part, int):
        return [part]
    pieces: list[str | int] = []
    for text in part.split(mark):
        pieces += [text, id] if text else [id]
    return pieces[:-1]


def _bpe(key: str, vocabulary: dict[str, int], merges: Any, **options: Any) -> Any:
    """A tokenizers.Tokenizer of a BPE model. ValueError names `key` if a merge has unknown tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    try:
        return Backend(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{key}: {error}") from None


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A merge is "left right"; of equal merges the first counts."""
    merges = [m.partition(" ")[::2] for m in dict.fromkeys(_strings(metadata, "tokenizer.ggml.merges"))]
    if bad := next((left for left, right in merges if not left or not right or " " in right), None):
        raise ValueError(f"tokenizer.ggml.merges: {bad[:80]!r} is not two tokens with a space between")
    return merges


def splitter(pre: PreTokenizer) -> Any:
    """What cuts text into words by these patterns: a tokenizers.PreTokenizer."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: _Tokens) -> Vocabulary:
    name = _value(metadata, "tokenizer.ggml.pre", str, "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise NotImplementedError(
            f"tokenizer.ggml.pre = {name[:80]!r} is not supported; supported: {supported}"
        )

    merges = _merges(metadata)
    control = tokens.ids.keys() - tokens.bpe_ids.keys()
    texts = itertools.chain(itertools.chain.from_iterable(merges), map("".join, merges))
    if not control.isdisjoint(texts):
        merges = [(left, right) for left, right in merges if control.isdisjoint((left, right, left + right))]
    # Bytes without a token are dropped after merging; before, they keep their neighbours from merging.
    count = len(tokens.texts)
    missing = [character for character in BYTE_ALPHABET if character not in tokens.bpe_ids]
    ids = tokens.bpe_ids | {character: count + i for i, character in enumerate(missing)}
    backend = _bpe("tokenizer.ggml.merges", ids, merges, ignore_merges=pre.ignore_merges)
    backend.pre_tokenizer = splitter(pre)

    return tokens.vocabulary(
        metadata,
        encode_plain=_ByteLevel(backend, count if missing else None),
        bos_id=tokens.special_id(metadata, "bos"),
        eos_id=tokens.special_id(metadata, "eos"),
        add_bos=pre.add_bos,
        byte_level=True,
        space_prefix=False,
    )


def _raw_bpe(metadata: Mapping[str, Any], tokens: _Tokens) -> Vocabulary:
    """Gemma 4's: merges as in byte-level BPE, but of characters, with U+2581 for a space.

    Only line breaks end a word, and a run of them that is a token is taken whole. BOS is always added,
    whatever the file says.
    """
    _check_bytes(tokens)
    backend = _bpe("tokenizer.ggml.merges", tokens.bpe_ids, _merges(metadata), byte_fallback=True)
    runs = {text: id for text, id in tokens.bpe_ids.items() if not text.strip("\n")}
    return tokens.vocabulary(
        {**metadata, "tokenizer.ggml.add_bos_token": True},
        encode_plain=_Raw(backend, runs),
        bos_id=tokens.special_id(metadata, "bos"),
        eos_id=tokens.special_id(metadata, "eos"),
        add_bos=True,
        byte_level=False,
        space_prefix=False,
    )


def _check_bytes(tokens: _Tokens) -> None:
    for id, (kind, text) in enumerate(zip(tokens.kinds, tokens.texts, strict=True)):
        if kind == BYTE and not BYTE_TOKEN.fullmatch(text):
            raise ValueError(
                f"tokenizer.ggml.tokens[{id}] = {text[:80]!r} has type byte: expected <0x00> to <0xFF>"
            )


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: _Tokens) -> Vocabulary:
    texts, kinds = tokens.texts, tokens.kinds
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(texts), default=0.0 if not texts else None)
    if np.isnan(scores).any():
        raise ValueError(f"tokenizer.ggml.scores[{np.flatnonzero(np.isnan(scores))[0]}] is not a number")
    _check_bytes(tokens)
    long = next((id for id, text in enumerate(texts) if len(text) > _LONGEST_PIECE), None)
    if long is not None:
        raise ValueError(
            f"tokenizer.ggml.tokens[{long}] has {len(texts[long])} characters, the limit is {_LONGEST_PIECE}"
        )

    # Every way to form a token from two others is a merge; tokens with better scores come first.
    mergeable = {
        text for text, kind in zip(texts, kinds, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    merges = []
    for id in np.argsort(-scores.astype(np.float64), kind="stable"):
        if (text := texts[id]) in mergeable:
            pairs = [(text[:k], text[k:]) for k in range(1, len(text))]
            merges += [pair for pair in pairs if pair[0] in mergeable and pair[1] in mergeable]
    unknown_id = tokens.special_id(metadata, "unknown", 0)
    unknown = texts[unknown_id] if unknown_id is not None and texts[unknown_id] in tokens.bpe_ids else None
    backend = _bpe(
        "tokenizer.ggml.tokens",
        tokens.bpe_ids,
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    space_prefix = _value(metadata, "tokenizer.ggml.add_space_prefix", bool, True)

    return tokens.vocabulary(
        metadata,
        encode_plain=_SentencePiece(backend, space_prefix),
        bos_id=tokens.special_id(metadata, "bos", 1),
        eos_id=tokens.special_id(metadata, "eos", 2),
        add_bos=True,
        byte_level=False,
        space_prefix=space_prefix,
    )
