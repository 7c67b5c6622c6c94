"""Text to token ids and back: tokenizers from GGUF metadata or tokenizer.json, incremental detokenizing.

Ids are those of llama.cpp for the same GGUF file; what differs on purpose is said at `Tokenizer.from_gguf`.
Text comes back byte-exact: a token stands for bytes, and only a whole sequence of them is read as UTF-8.
"""

import codecs
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bonsai_jax.tokens import chat_template, tokenizer_gguf, tokenizer_huggingface
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
    """A model's tokenizer: a Vocabulary, and what is done with one. Make it with `from_checkpoint`,
    `from_gguf` or `from_folder`."""

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

        `tokenizer.ggml.model` may be "gpt2" (byte-level BPE, cut into words as `tokenizer.ggml.pre` says:
        pre_tokenizers.py) or "llama" (SentencePiece-style: the merge with the best score first). ValueError
        names a key whose value is missing or contradicts the others; NotImplementedError a kind that is not
        supported.

        As in llama.cpp there is no Unicode normalization, even where the model's tokenizer.json asks for NFC.
        Unlike llama.cpp, no text can spell a control token when parse_special is False (there, "</s>" can be
        merged from its characters), a normal token named like an end-of-generation token is just text, and
        equal scores in a "llama" vocabulary may merge in another order.

        A "llama" vocabulary writes a space as U+2581, in llama.cpp as in SentencePiece: U+2581 in a text has
        the ids of a space, and decode gives a space for it.
        """
        return Tokenizer(**vars(tokenizer_gguf.build(metadata)))

    @staticmethod
    def from_folder(folder: str | Path) -> "Tokenizer":
        """From a Hugging Face folder: tokenizer.json, and what tokenizer_config.json, generation_config.json,
        config.json and chat_template.jinja add to it. ValueError names the file that is missing or broken."""
        return Tokenizer(**vars(tokenizer_huggingface.build(Path(folder))))

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
            raise ValueError(
                f"text holds half a character (a surrogate) at {error.start}: it was not UTF-8, or was cut"
            ) from None
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
            return b"".join([bytes([BYTE_ALPHABET[c]]) if c in BYTE_ALPHABET else c.encode() for c in text])
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

    @functools.cached_property
    def _whole(self) -> dict[bool, dict[int, str]]:
        """By skip_special, texts of tokens that are whole characters, as detokenizers came across them."""
        return {False: {}, True: {}}

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
        self._whole = tokenizer._whole[skip_special]
        self._strip = at_start and tokenizer.space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes, often its own, sometimes "" or more."""
        alone = not (self._strip or self._decoder.buffer)
        if alone and (text := self._whole.get(id)) is not None:
            return text
        data = self._tokenizer._shown(id, self._skip_special)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        text = self._decoder.decode(data)
        if alone and not self._decoder.buffer:
            self._whole[id] = text
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for half a character, else ""."""
        return self._decoder.decode(b"", final=True)
