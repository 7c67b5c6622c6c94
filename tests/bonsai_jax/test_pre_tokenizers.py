"""Every pre-tokenizer that is accepted cuts as llama.cpp does, on a vocabulary that shows where.

Its merges are of a character's last byte and the next one's first, in random order: what is cut between two
characters is not merged, and most that is not cut is.
"""

# ruff: noqa: RUF001 - texts of many scripts

import functools
import random
import unicodedata

import pytest

from bonsai_jax.tokens.pre_tokenizers import PRE_TOKENIZERS
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import BYTE_ALPHABET, CONTROL, NORMAL
from tests.bonsai_jax.vocabularies import TEXTS, LlamaCpp, pair, sentencepiece_metadata, write_model

ASCII = "aZzsSdtlLreE09 '.!,$+_(</|\n\r\t~^`\x00#"
OTHERS = (
    "éÉßſΩжЖ中一龥字あアー한ㄱקאא\u0301\u0301\u0300ाा½²Ⅷ١३一〇🙂👍\u200d\u200c\u00a0\u3000\u2028\u0085\u1680"
    "«—…。，！‘«€∑¤ªǅʼ\ufeff\u200b\x7f\x1b\ue000\U00020000ﬀ𐐀"
)
SEPARATOR = "<|sep|>"  # a control token: all texts are one request


def is_old(character: str) -> bool:
    """Whether it is in every table of Unicode, with the same category (U+180E was a space)."""
    category = unicodedata.category(character)
    return (
        category == unicodedata.ucd_3_2_0.category(character)
        and category not in ("Cn", "Cs", "Co")
        and character != "\u180e"
    )


@functools.cache
def old_characters() -> list[str]:
    return [c for c in map(chr, range(0x20, 0x30000)) if is_old(c)]


def drawn(count: int, seed: int) -> list[str]:
    """Random texts: runs of characters that tokenizers treat apart, characters of all scripts, and words."""
    draw, old = random.Random(seed), old_characters()
    characters, parts = (
        ASCII * 2 + OTHERS,
        ["'s", "'LL", "  ", "\n\n", " Word", "word", " 1234", "\r\n", "漢字", "👍"],
    )
    made = []
    for i in range(count):
        if i % 7 < 4:
            runs = [draw.choice(characters) * draw.choice([1, 1, 1, 1, 2, 3, 7]) for _ in range(30)]
            made.append("".join(runs)[: draw.choice([2, 5, 12, 30])])
        elif i % 7 < 6:
            kinds = [old, old[:3000], characters]
            made.append("".join(draw.choice(draw.choice(kinds)) for _ in range(24)))
        else:
            made.append(
                "".join(draw.choice([draw.choice(characters), draw.choice(parts)]) for _ in range(20))
            )
    return made


@functools.cache
def texts() -> list[str]:
    made = [
        *("0990909 99090 0 90 909 0909a 099_909900", "a0990909.99090", "0" * 50, "१२३४५६७ ٣٤٥٦"),
        *("don'T WE'LL I'm he'D you'Ve 'tis rock'n'roll", "HTTPServer fooBar FooBAR éÀÉa aÉ 'Sx ǅa aǅ"),
        *(
            "a\r\n\r\nb \n \n c   d\n   e\t\tf\n\n",
            " " * 70 + "a" + "\n" * 40,
            "<sentinel:12> IMGIMGABZIMGIMGIZ",
        ),
        *(text for text in TEXTS if "<|" not in text),
    ]
    return made + drawn(350, 1)


@functools.cache
def vocabulary(every: int) -> dict:
    """Every so many-th merge of all."""
    character = {byte: c for c, byte in BYTE_ALPHABET.items()}
    ascii = sorted(ASCII.encode())
    last, first = [*dict.fromkeys(ascii), *range(0x80, 0xC0)], [*dict.fromkeys(ascii), *range(0xC2, 0xF5)]
    pairs = [(character[x], character[y]) for x in last for y in first]
    random.Random(0).shuffle(pairs)
    pairs = pairs[::every]
    unmerged = ["zzz", "Ġzzz", "eee", "Ġ中"]  # words that only a pre-tokenizer that ignores merges finds
    tokens = [*BYTE_ALPHABET, *("".join(pair) for pair in pairs), *unmerged]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, SEPARATOR],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }


@functools.cache
def llama_cpp(path):
    """Kept: to end one while others run can hang."""
    return LlamaCpp(path)


KINDS = {}
for name, kind in PRE_TOKENIZERS.items():
    KINDS.setdefault(kind, []).append(name)


@pytest.mark.parametrize("names", KINDS.values(), ids=lambda names: names[0])
def test_words_are_cut_as_in_llama_cpp(names, tmp_path):
    """All texts by one name of each kind, and some by the others: on half of the merges, by which 40 texts
    tell kinds apart as all texts on all merges do."""
    for name in names:
        metadata = vocabulary(1 if name == names[0] else 2) | {"tokenizer.ggml.pre": name}
        write_model(tmp_path / f"{name}.gguf", metadata)
        ours, theirs = Tokenizer.from_gguf(metadata), llama_cpp(tmp_path / f"{name}.gguf")
        some = texts() if name == names[0] else texts()[:40]
        joined = SEPARATOR.join(["zzz eee zzz", *some])
        if (got := ours.encode(joined)) != (want := theirs.encode(joined)):
            same = next(i for i, ids in enumerate(zip(got, want, strict=False)) if len({*ids}) == 2)
            text = some[want[:same].count(ours.bos_id) - ours.add_bos - 1]
            pytest.fail(f"{name}: {text!a} has other ids, from {want[same - 4 : same + 4]} on")


@pytest.mark.slow
@pytest.mark.parametrize("names", KINDS.values(), ids=lambda names: names[0])
def test_a_thousand_random_texts_are_cut_as_in_llama_cpp(names, tmp_path):
    metadata = vocabulary(1) | {"tokenizer.ggml.pre": names[0]}
    write_model(tmp_path / "model.gguf", metadata)
    ours, theirs = Tokenizer.from_gguf(metadata), llama_cpp(tmp_path / "model.gguf")
    for text in drawn(1000, 2):
        assert ours.encode(text) == theirs.encode(text), ascii(text)


NOT_BYTE_LEVEL = ("gemma4", "sentencepiece", "sentencepiece-bare")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=pytest.mark.slow if count == 1000 else ())
        for name in NOT_BYTE_LEVEL
        for count in (100, 1000)
    ],
)
def test_random_texts_of_other_tokenizers_have_llama_cpp_s_ids(name, count):
    ours, theirs = pair(name)
    for text in drawn(count, 3):
        for add_special in (True, False):
            ids = theirs.encode(text, add_special=add_special)
            assert ours.encode(text, add_special=add_special) == ids, ascii(text)


def test_a_sentencepiece_vocabulary_has_the_spaces_that_its_file_asks_for(tmp_path):
    """With and without a space before the text. As in llama.cpp, remove_extra_whitespaces has no effect."""
    for prefix in (True, False):
        metadata = sentencepiece_metadata(prefix) | {"tokenizer.ggml.remove_extra_whitespaces": True}
        write_model(tmp_path / f"{prefix}.gguf", metadata)
        ours, theirs = Tokenizer.from_gguf(metadata), llama_cpp(tmp_path / f"{prefix}.gguf")
        for text in ("a  b", "  a", "a   ", " ", "a</s> b", "</s>a  b</s>  ", "\n a"):
            assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode("a  b")) == "a  b"
