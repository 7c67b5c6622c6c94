"""Text to token ids and back: tokenizers from GGUF metadata or tokenizer.json, incremental detokenizing.

Ids are those of llama.cpp for the same GGUF file; what differs on purpose is said at `Tokenizer.from_gguf`.
Text comes back byte-exact: a token stands for bytes, and only a whole sequence of them is read as UTF-8.
"""

import codecs
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bonsai_jax import chat_template

# What a token is, numbered as GGUF's tokenizer.ggml.token_type. Control and unknown tokens are not shown.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE = "\u2581"  # how SentencePiece writes a space
_LONGEST_PIECE = 1024  # characters; the longest in real vocabularies have a few hundred
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

# A user-defined token of one of these names is a control token, as in llama.cpp. The first end a generation.
_END_TEXTS = (  # noqa: SIM905 - a list would fill a page
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> "
    "_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <\uff5cend▁of▁sentence\uff5c> <|fim_pad|> "
    "<fim-pad> <fim_pad> <PAD> [PAD] <|file_sep|> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"
).split()
_FILL_TEXTS = (  # noqa: SIM905
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> "
    "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID>"
).split()


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How byte-level BPE cuts text into words: each pattern cuts what the one before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges make of it
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (  # DIGITS: how many of them make a word
    r"'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2": _PreTokenizer((_LLAMA3.replace("DIGITS", ""),)),
    "llama-bpe": _PreTokenizer((_LLAMA3.replace("DIGITS", "{1,3}"),), ignore_merges=True, add_bos=True),
}
_ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "starcoder": "smollm",
    "deepseek-r1-qwen": "qwen2",
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's way to write bytes as printable characters: {character: byte}."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """A model's tokenizer. Make one with `from_checkpoint`, `from_gguf` or `from_folder`.

    texts          the file's own text of each token, by id
    kinds          what each token is, by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    byte_level     whether normal tokens are written in GPT-2's byte alphabet; else a space is written U+2581
    space_prefix   whether encoding puts a space before a text, which decoding takes away again
    bos_id         beginning of sequence, or None
    eos_ids        every id that ends a generation: end of sequence, of turn, of message, of file
    pad_id         padding, or None
    add_bos        whether encode(add_special=True) starts with bos_id; add_eos: whether it ends with eos_id
    chat_template  jinja2 source, or None
    encoder        (text, parse_special) -> ids, without BOS and EOS
    """

    texts: Sequence[str]
    kinds: bytes
    byte_level: bool
    space_prefix: bool
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    encoder: Callable[[str, bool], list[int]]

    @staticmethod
    def from_checkpoint(checkpoint: Any) -> "Tokenizer":
        """The tokenizer that lies in a `checkpoints.Checkpoint`, or beside it. Errors as in the two below."""
        if checkpoint.naming == "gguf":
            return Tokenizer.from_gguf(checkpoint.metadata)
        if checkpoint.folder is None:
            raise ValueError(f"{checkpoint.source}: no folder, so no tokenizer.json")
        return Tokenizer.from_folder(checkpoint.folder)

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> "Tokenizer":
        """From GGUF's `tokenizer.*` keys; arrays are lists of str and numpy arrays (or lists) of numbers.

        `tokenizer.ggml.model` may be "gpt2" (byte-level BPE, cut into words as `tokenizer.ggml.pre` says) or
        "llama" (SentencePiece-style: the merge with the best score first). ValueError names a key whose
        value is missing or contradicts the others; NotImplementedError a kind that is not supported.

        As in llama.cpp there is no Unicode normalization, even where the model's tokenizer.json asks for NFC.
        Unlike llama.cpp, no text can spell a control token when parse_special is False (there, "</s>" can be
        merged from its characters), a normal token named like an end-of-generation token is just text, and
        equal scores in a "llama" vocabulary may merge in another order.
        """
        vocabulary = _GgufVocabulary.read(metadata)
        kind = _value(metadata, "tokenizer.ggml.model", str)
        if kind == "gpt2":
            return _byte_level_bpe(metadata, vocabulary)
        if kind == "llama":
            return _sentencepiece_bpe(metadata, vocabulary)
        raise NotImplementedError(
            f"tokenizer.ggml.model = {kind!r} is not supported; supported: 'gpt2', 'llama'"
        )

    @staticmethod
    def from_folder(folder: str | Path) -> "Tokenizer":
        """From a Hugging Face folder: tokenizer.json, and what tokenizer_config.json, generation_config.json,
        config.json and chat_template.jinja add to it. ValueError names the file that is missing or broken."""
        return _huggingface(Path(folder))

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; a model's embedding may have more rows."""
        return len(self.texts)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special    add BOS and EOS where the file asks for them; False for what apply_chat_template made
        parse_special  "<|im_start|>" in the text is the control token of that name; with False it is plain
                       text, so text from strangers cannot forge a turn
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds half a character (a surrogate) at {error.start}") from None
        ids = self.encoder(text, parse_special)
        before = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        after = [self.eos_id] if add_special and self.add_eos and self.eos_id is not None else []
        return [*before, *ids, *after]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        skip_special  leave control and unknown tokens out (the default: text for people)
        at_start      the ids begin a text, so the space that encoding put before it is taken away; with False
                      they continue one (generated text after a prompt) and " Paris" keeps its space
        Ids beyond the vocabulary give nothing; ValueError for a negative one.
        """
        data = b"".join([self._shown(id, skip_special) for id in ids])
        if at_start and self.space_prefix:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for, control tokens by their name; b"" if unused or beyond the vocabulary.

        ValueError for a negative id.
        """
        if id < 0:
            raise ValueError(f"token id {id} is negative")
        if id >= len(self.texts):
            return b""
        text, kind = self.texts[id], self.kinds[id]
        if kind == NORMAL and self.byte_level:
            return b"".join([bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in text])
        if kind == NORMAL:
            return text.replace(SPACE, " ").encode()
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        return b"" if kind == UNUSED else text.encode()

    def detokenizer(self, *, skip_special: bool = True, at_start: bool = True) -> "Detokenizer":
        """An incremental `decode` with the same arguments, for one stream of ids."""
        return Detokenizer(self, skip_special, at_start)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt text for a conversation, `messages` being [{"role": ..., "content": ...}, ...].

        `extra` are further variables of the template (tools, enable_thinking ...). Encode the result with
        add_special=False: templates write BOS themselves. Control tokens spelled in a message become real
        ones when that text is encoded; `encode_chat` prevents it. Raises `chat_template.ChatTemplateError` if
        there is no template, or it is broken, refuses the messages, or exceeds its bounds.
        """
        if self.chat_template is None:
            raise chat_template.ChatTemplateError(
                "this model has no chat template: use plain text prompts, or set one with "
                "dataclasses.replace(tokenizer, chat_template=...)"
            )
        variables = {"bos_token": self._text(self.bos_id), "eos_token": self._text(self.eos_id), **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return chat_template.render(self.chat_template, variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Token ids of `apply_chat_template`, in which no message can forge a control token.

        Where a string in the messages spells one, the spelling is fenced with noncharacters before the
        template sees it, and encoded as plain text afterwards.
        """
        text = self.apply_chat_template(_fenced(messages, self._control_names), **template_arguments)
        ids = []
        for i, part in enumerate(re.split(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", text, flags=re.DOTALL)):
            ids += self.encode(_unfenced(part), add_special=False, parse_special=i % 2 == 0)
        return ids

    @functools.cached_property
    def _control_names(self) -> re.Pattern[str]:
        """Matches the name of any token that is not shown, the longest first."""
        names = [
            text for text, kind in zip(self.texts, self.kinds, strict=True) if kind in (CONTROL, UNKNOWN)
        ]
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    def _text(self, id: int | None) -> str:
        return "" if id is None else self.texts[id]

    def _shown(self, id: int, skip_special: bool) -> bytes:
        if skip_special and 0 <= id < len(self.kinds) and self.kinds[id] in (CONTROL, UNKNOWN):
            return b""
        return self.token_bytes(id)

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos_id={self.bos_id}, eos_ids={sorted(self.eos_ids)})"
        )


# Noncharacters: valid in a str, never in a text that was meant.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


def _fenced(value: Any, spelled: re.Pattern[str]) -> Any:
    """A copy of nested messages, in whose strings every match of `spelled` lies between _OPEN and _CLOSE."""
    if isinstance(value, str):
        return spelled.sub(f"{_OPEN}\\g<0>{_CLOSE}", _unfenced(value))
    if isinstance(value, Mapping):
        return {key: _fenced(item, spelled) for key, item in value.items()}
    return [_fenced(item, spelled) for item in value] if isinstance(value, list | tuple) else value


def _unfenced(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


class Detokenizer:
    """Turns a stream of ids into text as it becomes certain: the pushes and the flush join to `decode(ids)`.

    A character whose bytes are spread over tokens appears when its last byte does; bytes that can no longer
    become a character appear as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, at_start: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip = at_start and tokenizer.space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes, often its own, sometimes "" or more."""
        data = self._tokenizer._shown(id, self._skip_special)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for half a character, else ""."""
        return self._decoder.decode(b"", final=True)


# ---- GGUF ----


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
        raise ValueError(f"{key} holds {bad.pop().__name__}, expected strings")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int, default: float | None) -> np.ndarray:
    """metadata[key] as an array of `count` numbers, all `default` where the key is absent."""
    if default is not None and key not in metadata:
        return np.full(count, default)
    try:
        values = np.asarray(_value(metadata, key, object))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ValueError(f"{key}: expected a list of numbers, found shape {values.shape} of {values.dtype}")
    if len(values) != count:
        raise ValueError(f"{key} has {len(values)} entries, but tokenizer.ggml.tokens has {count}")
    return values


@dataclasses.dataclass(frozen=True)
class _GgufVocabulary:
    """What both kinds of GGUF tokenizer share.

    ids is {text: id}; bpe_ids leaves control tokens out, so that BPE cannot make one from plain text.
    """

    texts: list[str]
    kinds: bytes
    ids: dict[str, int]
    bpe_ids: dict[str, int]

    @staticmethod
    def read(metadata: Mapping[str, Any]) -> "_GgufVocabulary":
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
        for text in _END_TEXTS + _FILL_TEXTS:
            if text in ids and kinds[ids[text]] == USER_DEFINED:
                kinds[ids[text]] = CONTROL
        bpe_ids = dict(ids)
        for id in np.flatnonzero(np.frombuffer(kinds, np.uint8) == CONTROL):
            del bpe_ids[texts[id]]
        return _GgufVocabulary(texts, bytes(kinds), ids, bpe_ids)

    def special_id(self, metadata: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = _value(metadata, key, int, None)
        if id is None:
            return default if default is not None and default < len(self.texts) else None
        if not 0 <= id < len(self.texts):
            raise ValueError(f"{key} = {id}, but there are {len(self.texts)} tokens")
        return id

    def tokenizer(
        self,
        metadata: Mapping[str, Any],
        *,
        encode_plain: Callable[[str, bool], list[int]],
        bos_id: int | None,
        eos_id: int | None,
        add_bos: bool,
        **fields: Any,
    ) -> Tokenizer:
        """The Tokenizer, given how it encodes text without special tokens: (text, follows special) -> ids."""
        add_bos = _value(metadata, "tokenizer.ggml.add_bos_token", bool, add_bos)
        add_eos = _value(metadata, "tokenizer.ggml.add_eos_token", bool, False)
        for name, add, id in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
            if add and id is None:
                raise ValueError(
                    f"tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{name}_token_id is not"
                )
        ends = {eos_id, *(self.special_id(metadata, name) for name in ("eot", "eom"))}
        ends |= {
            self.ids[text]
            for text in _END_TEXTS
            if text in self.ids and self.kinds[self.ids[text]] == CONTROL
        }
        template = _value(metadata, "tokenizer.chat_template", str, None)
        return Tokenizer(
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
        """Finds special tokens in a text, longest first as llama.cpp does, and encodes what lies between."""
        special = [id for id, kind in enumerate(self.kinds) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
        special.sort(key=lambda id: -len(self.texts[id].encode()))
        user_defined = [id for id in special if self.kinds[id] == USER_DEFINED]

        def encode(text: str, parse_special: bool) -> list[int]:
            parts: list[str | int] = [text] if text else []
            for id in special if parse_special else user_defined:
                if self.texts[id] in text:
                    parts = [piece for part in parts for piece in _cut(part, self.texts[id], id)]
            ids, follows_special = [], True
            for part in parts:
                ids += [part] if isinstance(part, int) else encode_plain(part, follows_special)
                follows_special = isinstance(part, int)
            return ids

        return encode


def _cut(part: str | int, mark: str, id: int) -> list[str | int]:
    """A text cut at every `mark`, with `id` in its place and no empty pieces; an id as it is."""
    if isinstance(part, int):
        return [part]
    pieces: list[str | int] = []
    for text in part.split(mark):
        pieces += [text, id] if text else [id]
    return pieces[:-1]


def _bpe(key: str, vocabulary: dict[str, int], merges: Any, **options: Any) -> Any:
    """A tokenizers.Tokenizer of a BPE model; ValueError names `key` where a merge is of unknown tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    try:
        return Backend(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{key}: {error}") from None


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _GgufVocabulary) -> Tokenizer:
    from tokenizers import Regex, pre_tokenizers

    name = _value(metadata, "tokenizer.ggml.pre", str, "default")
    pre = _PRE_TOKENIZERS.get(_ALIASES.get(name) or name)
    if pre is None:
        supported = ", ".join(sorted([*_PRE_TOKENIZERS, *_ALIASES]))
        raise NotImplementedError(f"tokenizer.ggml.pre = {name!r} is not supported; supported: {supported}")

    # A merge is "left right"; the first of two equal ones counts.
    merges = [m.partition(" ")[::2] for m in dict.fromkeys(_strings(metadata, "tokenizer.ggml.merges"))]
    if bad := next((left for left, right in merges if not left or not right or " " in right), None):
        raise ValueError(f"tokenizer.ggml.merges: {bad[:80]!r} is not two tokens with a space between")
    # Bytes without a token are dropped, but only after merging: until then they keep their neighbours apart.
    count = len(vocabulary.texts)
    missing = [character for character in _BYTES if character not in vocabulary.bpe_ids]
    ids = vocabulary.bpe_ids | {character: count + i for i, character in enumerate(missing)}
    backend = _bpe("tokenizer.ggml.merges", ids, merges, ignore_merges=pre.ignore_merges)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )

    def encode_plain(text: str, follows_special: bool) -> list[int]:
        ids = backend.encode(text, add_special_tokens=False).ids
        return [id for id in ids if id < count] if missing else ids

    return vocabulary.tokenizer(
        metadata,
        encode_plain=encode_plain,
        bos_id=vocabulary.special_id(metadata, "bos"),
        eos_id=vocabulary.special_id(metadata, "eos"),
        add_bos=pre.add_bos,
        byte_level=True,
        space_prefix=False,
    )


def _sentencepiece_bpe(metadata: Mapping[str, Any], vocabulary: _GgufVocabulary) -> Tokenizer:
    texts, kinds = vocabulary.texts, vocabulary.kinds
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(texts), default=0.0 if not texts else None)
    if np.isnan(scores).any():
        raise ValueError(f"tokenizer.ggml.scores[{np.flatnonzero(np.isnan(scores))[0]}] is not a number")
    for id, kind in enumerate(kinds):
        if kind == BYTE and not _BYTE_TOKEN.fullmatch(texts[id]):
            raise ValueError(
                f"tokenizer.ggml.tokens[{id}] = {texts[id][:80]!r} has type byte: expected <0x00> to <0xFF>"
            )
        if len(texts[id]) > _LONGEST_PIECE:
            raise ValueError(
                f"tokenizer.ggml.tokens[{id}] has {len(texts[id])} characters, the limit is {_LONGEST_PIECE}"
            )

    # Every way to put a token together from two others is a merge, and the better token goes first.
    mergeable = {
        text for text, kind in zip(texts, kinds, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    merges = []
    for id in np.argsort(-scores.astype(np.float64), kind="stable"):
        if (text := texts[id]) in mergeable:
            pairs = [(text[:k], text[k:]) for k in range(1, len(text))]
            merges += [pair for pair in pairs if pair[0] in mergeable and pair[1] in mergeable]
    unknown_id = vocabulary.special_id(metadata, "unknown", 0)
    unknown = (
        texts[unknown_id] if unknown_id is not None and texts[unknown_id] in vocabulary.bpe_ids else None
    )
    backend = _bpe(
        "tokenizer.ggml.tokens",
        vocabulary.bpe_ids,
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    space_prefix = _value(metadata, "tokenizer.ggml.add_space_prefix", bool, True)

    def encode_plain(text: str, follows_special: bool) -> list[int]:
        text = " " + text if space_prefix and follows_special else text
        return backend.encode(text.replace(" ", SPACE), add_special_tokens=False).ids

    return vocabulary.tokenizer(
        metadata,
        encode_plain=encode_plain,
        bos_id=vocabulary.special_id(metadata, "bos", 1),
        eos_id=vocabulary.special_id(metadata, "eos", 2),
        add_bos=True,
        byte_level=False,
        space_prefix=space_prefix,
    )


# ---- Hugging Face ----


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _huggingface(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing (of a Hugging Face folder's tokenizer files only tokenizer.json is read)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{path} cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    byte_level, space_prefix = _decoder_kind(path, backend)
    texts, kinds = _huggingface_vocabulary(path, backend, byte_level)

    config = _json(folder / "tokenizer_config.json")
    ids = {name: _token_id(folder, backend, config, name) for name in ("bos", "eos", "pad")}
    ends = {ids["eos"], *(backend.token_to_id(text) for text in _END_TEXTS)}
    ends = {id for id in ends if id is not None and (id == ids["eos"] or kinds[id] == CONTROL)}
    for name in ("generation_config.json", "config.json"):
        listed = _json(folder / name).get("eos_token_id") or []
        listed = listed if isinstance(listed, list) else [listed]
        ends |= {id for id in listed if isinstance(id, int) and id >= 0}

    added = backend.encode("").ids  # what the post-processor puts around a text
    add_bos = added[:1] == [ids["bos"]]
    add_eos = added[add_bos:] == [ids["eos"]]
    if len(added) != add_bos + add_eos:
        names = [texts[id] for id in added]
        raise NotImplementedError(
            f"{path} puts {names} around a text; supported: BOS before it and EOS after it"
        )

    @functools.cache
    def without_special() -> Any:
        copy = Backend.from_str(backend.to_str())
        copy.encode_special_tokens = True  # encode their names as text
        return copy

    def encode(text: str, parse_special: bool) -> list[int]:
        return (backend if parse_special else without_special()).encode(text, add_special_tokens=False).ids

    return Tokenizer(
        texts=texts,
        kinds=kinds,
        byte_level=byte_level,
        space_prefix=space_prefix,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        eos_ids=frozenset(ends),
        pad_id=ids["pad"],
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=_huggingface_template(folder, config),
        encoder=encode,
    )


def _decoder_kind(path: Path, backend: Any) -> tuple[bool, bool]:
    """(byte_level, space_prefix) of a tokenizer.json, from its decoder."""
    state: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
    )
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if "ByteLevel" in steps:
        return True, False
    if "Metaspace" in steps:
        return False, steps["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in steps:
        return False, "Strip" in steps and steps["Strip"].get("start", 0) > 0
    raise NotImplementedError(
        f"{path}: decoder {list(steps)} is not supported; supported: ByteLevel, ByteFallback, Metaspace"
    )


def _huggingface_vocabulary(path: Path, backend: Any, byte_level: bool) -> tuple[list[str], bytes]:
    """(texts, kinds) by id. Ids without a token are unused."""
    ids = backend.get_vocab(with_added_tokens=True)
    count = max(ids.values(), default=-1) + 1
    if not 0 < count <= 2 * len(ids) + 65536:
        raise ValueError(f"{path}: {len(ids)} tokens, but ids up to {count - 1}")
    texts, kinds = [""] * count, bytearray([UNUSED]) * count
    for text, id in ids.items():
        texts[id] = text
        kinds[id] = BYTE if not byte_level and _BYTE_TOKEN.fullmatch(text) else NORMAL
    for id, token in backend.get_added_tokens_decoder().items():
        kinds[id] = CONTROL if token.special else USER_DEFINED
    unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
    if unknown is not None:
        kinds[unknown] = UNKNOWN
    return texts, bytes(kinds)


def _token_id(folder: Path, backend: Any, config: dict[str, Any], name: str) -> int | None:
    """Id of tokenizer_config.json's bos_token, eos_token or pad_token."""
    token = config.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    id = backend.token_to_id(token) if isinstance(token, str) else None
    if id is None:
        raise ValueError(f"{folder}/tokenizer_config.json: {name}_token = {token!r} is not in tokenizer.json")
    return id


def _huggingface_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja if there is one, else tokenizer_config.json's template, of several the default."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise ValueError(
            f"{folder}/tokenizer_config.json: chat_template is a {type(template).__name__}, expected text"
        )
    return template
