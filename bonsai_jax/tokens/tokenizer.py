"""Text to token ids and back: tokenizers from GGUF metadata or tokenizer.json, incremental detokenizing.

Ids are those of llama.cpp for the same GGUF file; `Tokenizer.from_gguf` lists the intended differences.
Decoding restores the exact bytes: a token stands for bytes, and UTF-8 is decoded over whole sequences of
tokens.
"""

import codecs
import collections
import functools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bonsai_jax.tokens import chat_template, tokenizer_gguf, tokenizer_huggingface
from bonsai_jax.tokens import messages as chat_messages
from bonsai_jax.tokens.calls import FORMATS, call_format
from bonsai_jax.tokens.calls.format import Format
from bonsai_jax.tokens.tools import checked
from bonsai_jax.tokens.vocabulary import (
    BYTE,
    BYTE_ALPHABET,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    Vocabulary,
)


class Tokenizer(Vocabulary):
    """A model's tokenizer: a Vocabulary with methods to encode and decode. Create it with `from_checkpoint`,
    `from_gguf` or `from_folder`."""

    @staticmethod
    def from_checkpoint(checkpoint: Any) -> "Tokenizer":
        """The tokenizer in a `checkpoints.Checkpoint`, or in files beside it. Errors are those of `from_gguf`
        and `from_folder`."""
        if checkpoint.naming == "gguf":
            vocabulary = tokenizer_gguf.build(checkpoint.metadata)
        elif checkpoint.folder is not None:
            vocabulary = tokenizer_huggingface.build(checkpoint.folder)
        else:
            raise ValueError(f"{checkpoint.source}: no folder, so no tokenizer.json")
        return Tokenizer(**vars(vocabulary))

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> "Tokenizer":
        """From GGUF's `tokenizer.*` keys; arrays are lists of str and numpy arrays (or lists) of numbers.

        `tokenizer.ggml.model` may be "gpt2" (byte-level BPE; `tokenizer.ggml.pre` says how text is cut into
        words, see pre_tokenizers.py), "llama" (SentencePiece-style: the merge with the best score first) or
        "gemma4" (BPE over characters, in which only line breaks end a word).
        ValueError names a key whose value is missing or contradicts the others, NotImplementedError a kind of
        tokenizer that is not supported.

        As in llama.cpp there is no Unicode normalization, even if the model's tokenizer.json asks for NFC.
        Unlike in llama.cpp, text cannot spell a control token when parse_special is False (llama.cpp can
        merge "</s>" from its characters), a normal token named like an end-of-generation token is just text,
        and equal scores in a "llama" vocabulary may merge in another order.

        A "llama" vocabulary writes a space as U+2581, as in llama.cpp and SentencePiece: U+2581 in a text
        gets the ids of a space, and decode returns a space for it.
        """
        return Tokenizer(**vars(tokenizer_gguf.build(metadata)))

    @staticmethod
    def from_folder(folder: str | Path) -> "Tokenizer":
        """From a Hugging Face folder: tokenizer.json, completed by tokenizer_config.json,
        generation_config.json, config.json and chat_template.jinja. ValueError names a file that is missing
        or broken."""
        return Tokenizer(**vars(tokenizer_huggingface.build(Path(folder))))

    @property
    def vocab_size(self) -> int:
        """The number of tokens; a model's embedding may have more rows."""
        return len(self.texts)

    @functools.cached_property
    def longest_text(self) -> int:
        """Characters of the longest token as it is stored; no token stands for more."""
        return max(map(len, self.texts))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special    add BOS and EOS if the file asks for them; False for the result of apply_chat_template
        parse_special  "<|im_start|>" in the text is the control token of that name; if False it is plain
                       text, so that text from strangers cannot forge a turn
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}; give a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has half a character (a surrogate) at {error.start}: it was not UTF-8, or was cut"
            ) from None
        ids = self.encoder(text, parse_special)
        before = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        after = [self.eos_id] if add_special and self.add_eos and self.eos_id is not None else []
        return [*before, *ids, *after]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        skip_special  leave out control and unknown tokens, for text that people read
        at_start      the ids begin a text, so the space that encoding put before it is removed; if False they
                      continue a text (generated text after a prompt), and " Paris" keeps its space
        Ids beyond the vocabulary have no text. Raises ValueError for a negative id.
        """
        try:
            ids = [operator.index(id) for id in ids]
        except TypeError:
            raise TypeError(f"ids: a {type(ids).__name__} was given; expected whole numbers") from None
        data = b"".join([self._shown(id, skip_special) for id in ids])
        if at_start and self.space_prefix:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for: for a control token its name, b"" for an unused id or one beyond
        the vocabulary. Raises ValueError for a negative id."""
        if id < 0:
            raise ValueError(f"ids: token id {id} is negative")
        if id >= len(self.texts):
            return b""
        text, kind = self.texts[id], self.kinds[id]
        if kind == NORMAL and self.byte_level:
            return b"".join([bytes([BYTE_ALPHABET[c]]) if c in BYTE_ALPHABET else c.encode() for c in text])
        if kind == NORMAL:
            return text.replace(SPACE, " ").encode()
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        return b"" if kind == UNUSED else text.encode()

    def detokenizer(self, *, skip_special: bool = True, at_start: bool = True) -> "Detokenizer":
        """An incremental `decode` with the same arguments, for one stream of ids."""
        return Detokenizer(self, skip_special, at_start)

    def answer_detokenizer(self) -> "Detokenizer":
        """The detokenizer of answers, which continue their prompts. It leaves out control tokens, but not
        those that divide an answer (answer_parser.py): all of gpt-oss's, and the marks of calls."""
        return Detokenizer(self, not self.writes_harmony, False, self._call_marks)

    @functools.cached_property
    def _call_marks(self) -> frozenset[int]:
        """Ids of control tokens that are marks of calls."""
        marks = self.call_format.marks if self.call_format is not None else ()
        return frozenset(id for text, id in self.control_ids.items() if text in marks)

    @functools.cached_property
    def control_ids(self) -> dict[str, int]:
        """The control tokens, {name: id}."""
        pairs = zip(self.texts, self.kinds, strict=True)
        return {text: id for id, (text, kind) in enumerate(pairs) if kind == CONTROL}

    @functools.cached_property
    def call_format(self) -> Format | None:
        """The format in which the model writes calls of functions, as its chat template shows; None if it is
        not known, and for gpt-oss."""
        return None if self.writes_harmony else call_format(self.chat_template, self.control_ids)

    def known_call_format(self) -> Format:
        """The model's `call_format`. Raises NotImplementedError if there is none."""
        if self.call_format is None:
            names = ", ".join(dict.fromkeys(format.name for format in FORMATS))
            raise NotImplementedError(
                "tools: this model's chat template shows no format of calls that we can read "
                f"({names}, harmony); ask without tools, or use a model that was trained to call functions"
            )
        return self.call_format

    @functools.cached_property
    def writes_harmony(self) -> bool:
        """Whether answers are messages with headers: gpt-oss (answer_parser.py)."""
        return {"<|start|>", "<|channel|>", "<|message|>"} <= self.control_ids.keys()

    @functools.cached_property
    def answers_begin(self) -> str:
        """What the chat template writes before an answer, without variables such as enable_thinking; "" if
        that cannot be told."""
        asked = [{"role": "user", "content": "Hello"}]
        try:
            without, text = (
                self.apply_chat_template(asked, add_generation_prompt=begins) for begins in (False, True)
            )
        except ValueError:  # no template, or one that refuses this
            return ""
        return text.removeprefix(without) if text.startswith(without) else ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text for a conversation.

        messages  [{"role": ..., "content": ...}, ...] as OpenAI's API has them: messages of the assistant may
                  have "tool_calls" and "reasoning_content"; those of a "tool" have a "tool_call_id". They are
                  brought into the form that this template reads (messages.py)
        tools     functions that the model may call: [{"type": "function", "function": {"name": ...,
                  "description": ..., "parameters": JSON schema}}, ...]
        extra     further variables of the template (enable_thinking ...)

        Encode the result with add_special=False, because templates write BOS themselves. A message that
        spells a control token would become that token when the text is encoded; `encode_chat` prevents it.
        Raises `chat_template.ChatTemplateError` if there is no template, or it is broken, refuses the
        messages, or exceeds its budget; ValueError for tools or calls in another form, and for tools if the
        template does not show them to the model.
        """
        if self.chat_template is None:
            raise chat_template.ChatTemplateError(
                "this model has no chat template: use plain text prompts, or set one with "
                "dataclasses.replace(tokenizer, chat_template=...)"
            )
        variables = {"bos_token": self._text(self.bos_id), "eos_token": self._text(self.eos_id), **extra}
        own = chat_messages.for_template(self.chat_template, messages)
        variables |= {"messages": own, "add_generation_prompt": add_generation_prompt}
        if tools:
            if "tools" not in self.chat_template:
                raise ValueError("tools: this model's chat template does not show tools to the model")
            variables["tools"] = checked(tools)
        return chat_template.render(self.chat_template, variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> list[int]:
        """Token ids of `apply_chat_template`; messages and tools cannot forge control tokens.

        If a string in them spells a control token, the name is fenced with noncharacters before the template
        is rendered, and encoded as plain text afterwards.
        """
        return self.encode_chat_text(self.chat_text(messages, tools=tools, **template_arguments))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> str:
        """The text of `apply_chat_template` with fences, for `encode_chat_text`."""
        fenced = {"messages": messages, "tools": checked(tools) if tools else None}
        return self.apply_chat_template(**_fenced(fenced, self.control_names), **template_arguments)

    def encode_chat_text(self, text: str) -> list[int]:
        """Token ids of a `chat_text`, or of a part that begins and ends at control tokens of the
        template's."""
        ids = []
        for i, part in enumerate(re.split(f"{OPEN}(.*?)(?:{CLOSE}|$)", text, flags=re.DOTALL)):
            ids += self.encode(_unfenced(part), add_special=False, parse_special=i % 2 == 0)
        return ids

    @functools.cached_property
    def control_names(self) -> re.Pattern[str]:
        """Matches the name of any control or unknown token, the longest first."""
        names = [
            text for text, kind in zip(self.texts, self.kinds, strict=True) if kind in (CONTROL, UNKNOWN)
        ]
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    @functools.cached_property
    def _whole(self) -> dict[tuple[bool, frozenset[int]], dict[int, str]]:
        """Caches, by what detokenizers show, the texts of tokens that they saw to be whole characters."""
        return collections.defaultdict(dict)

    def _text(self, id: int | None) -> str:
        return "" if id is None else self.texts[id]

    def _shown(self, id: int, skip_special: bool, marks: frozenset[int] = frozenset()) -> bytes:
        special = 0 <= id < len(self.kinds) and self.kinds[id] in (CONTROL, UNKNOWN)
        if skip_special and special and id not in marks:
            return b""
        return self.token_bytes(id)

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos_id={self.bos_id}, eos_ids={sorted(self.eos_ids)})"
        )


# Noncharacters: a str may have them, but no text does.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


def _fenced(value: Any, spelled: re.Pattern[str]) -> Any:
    """A copy of nested messages; in its strings every match of `spelled` is between OPEN and CLOSE."""
    if isinstance(value, str):
        return spelled.sub(f"{OPEN}\\g<0>{CLOSE}", _unfenced(value))
    if isinstance(value, Mapping):
        return {_fenced(key, spelled): _fenced(item, spelled) for key, item in value.items()}
    return [_fenced(item, spelled) for item in value] if isinstance(value, list | tuple) else value


def _unfenced(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


class Detokenizer:
    """Turns a stream of ids into text as soon as it is certain. The texts of all pushes and of the flush,
    joined, equal `decode(ids)`.

    A character whose bytes are spread over several tokens appears with its last byte; bytes that can no
    longer become a character appear as U+FFFD.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, at_start: bool, marks: frozenset[int] = frozenset()
    ):
        """marks: control tokens that are shown although others are left out"""
        self._tokenizer = tokenizer
        self._skip_special, self._marks = skip_special, marks
        self._whole = tokenizer._whole[skip_special, marks]
        self._strip = at_start and tokenizer.space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes: usually that of its token, sometimes "" or more."""
        alone = not (self._strip or self._decoder.buffer)
        if alone and (text := self._whole.get(id)) is not None:
            return text
        data = self._tokenizer._shown(id, self._skip_special, self._marks)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        text = self._decoder.decode(data)
        if alone and not self._decoder.buffer:
            self._whole[id] = text
        return text

    def flush(self) -> str:
        """The rest of the text: U+FFFD if it ends in half a character, else ""."""
        return self._decoder.decode(b"", final=True)
