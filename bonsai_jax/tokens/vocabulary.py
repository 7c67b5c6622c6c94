"""A vocabulary, as read from tokenizer files: tokens, which of them are special, and how text becomes ids."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

# Kinds of tokens, numbered as in GGUF's tokenizer.ggml.token_type. Control and unknown tokens are not shown.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE = "\u2581"  # how SentencePiece writes a space
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in GPT-2's vocabularies: {character: byte}."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()

# Control tokens of these names end a generation, as in llama.cpp.
END_TEXTS = (  # noqa: SIM905 - a list would fill a page
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> "
    "_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <\uff5cend▁of▁sentence\uff5c> <|fim_pad|> "
    "<fim-pad> <fim_pad> <PAD> [PAD] <|file_sep|> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<turn|> <|tool_response> [e~[ <|flush|> <|calls|>"
).split()


def marks(names: Mapping[str, int]) -> list[str]:
    """The tokens of END_TEXTS that do not end an answer in this vocabulary, as in llama.cpp. In gpt-oss and
    Solar Open an answer has several messages, and <|end|> ends one. In Gemma 4 </s> is text.

    names  {text: id}
    """
    calls = "<|call|>" in names or "<|calls|>" in names
    messages = calls and ("<|return|>" in names or "<|flush|>" in names)
    named = [("<|end|>", messages), ("</s>", "<|tool_response>" in names)]
    return [text for text, is_mark in named if is_mark and text in names]


MOST_MORE = 128  # tokens at its end that one of two vocabularies may lack, as in llama.cpp


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """The tokens of a file, and how it cuts text into them.

    texts          the text of each token as the file writes it, by id
    kinds          the kind of each token, by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    byte_level     whether normal tokens are written in GPT-2's byte alphabet; else a space is written U+2581
    space_prefix   whether encoding puts a space before a text, and decoding removes it
    bos_id         beginning of sequence, or None
    eos_id         end of sequence, or None
    eos_ids        every id that ends a generation: end of sequence, of turn, of message, of file
    pad_id         padding, or None
    add_bos        whether encode(add_special=True) starts with bos_id
    add_eos        whether it ends with eos_id
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


def differ_at(one: Vocabulary, other: Vocabulary) -> int | None:
    """The first token that is another one in two vocabularies. None: they are the same, but for padding
    (unused tokens) and up to MOST_MORE tokens at the end of one."""
    sizes = [len(v.kinds.rstrip(bytes([UNUSED]))) for v in (one, other)]
    common = min(sizes)
    for id, texts in enumerate(zip(one.texts[:common], other.texts[:common], strict=True)):
        if texts[0] != texts[1]:
            return id
    return None if max(sizes) - common <= MOST_MORE else common
