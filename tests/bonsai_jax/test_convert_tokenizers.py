"""Tokenizers from GGUF metadata to the files of a Hugging Face folder, and back: the same tokens, by texts of
many scripts, and by llama.cpp."""

import json

import numpy as np
import pytest

from bonsai_jax.tokens import tokenizer_to_gguf, tokenizer_to_huggingface
from bonsai_jax.tokens.pre_tokenizers import PRE_TOKENIZERS
from bonsai_jax.tokens.tokenizer import Tokenizer
from tests.bonsai_jax.vocabularies import (
    TEXTS,
    LlamaCpp,
    byte_level_metadata,
    raw_metadata,
    sentencepiece_metadata,
    write_model,
)

# A name of each rule.
RULES = {rule: name for name, rule in reversed(PRE_TOKENIZERS.items())}.values()
OTHERS = {
    "sentencepiece": sentencepiece_metadata,
    "without a space before it": lambda: sentencepiece_metadata(space_prefix=False),
    "gemma4": raw_metadata,
}


def metadata(name: str) -> dict:
    return OTHERS[name]() if name in OTHERS else byte_level_metadata(name)


def written(files: dict, folder):
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", [*RULES, *OTHERS])
def test_a_tokenizer_comes_back(name, tmp_path):
    """Its tokens, their kinds, its merges or what makes them, its rule, and what ends a generation."""
    original = metadata(name) | {"tokenizer.chat_template": "{{ x }}", "tokenizer.ggml.eot_token_id": 3}
    folder = written(tokenizer_to_huggingface.files(original), tmp_path)
    count = len(original["tokenizer.ggml.tokens"])
    back = tokenizer_to_gguf.metadata(folder, rows=count + 2, model=name)
    ours, read, again = (
        Tokenizer.from_gguf(original),
        Tokenizer.from_folder(folder),
        Tokenizer.from_gguf(back),
    )
    for text in TEXTS[:11]:
        ids = ours.encode(text)
        assert read.encode(text) == ids and again.encode(text) == ids, text
        assert read.decode(ids) == ours.decode(ids)
    assert list(again.texts[:count]) == list(ours.texts) and again.texts[count:] == [
        f"[PAD{count}]", f"[PAD{count + 1}]",
    ]  # fmt: skip
    assert again.kinds[:count] == ours.kinds
    for key in ("bos_id", "eos_id", "eos_ids", "add_bos", "add_eos", "chat_template", "space_prefix"):
        assert getattr(read, key) == getattr(again, key) == getattr(ours, key), key
    if name in PRE_TOKENIZERS:
        assert PRE_TOKENIZERS[back["tokenizer.ggml.pre"]] == PRE_TOKENIZERS[name]
        assert back["tokenizer.ggml.merges"] == original["tokenizer.ggml.merges"]


@pytest.mark.parametrize("name", ["llama-bpe", "sentencepiece"])
def test_llama_cpp_makes_the_same_tokens(name, tmp_path):
    original = metadata(name)
    folder = written(tokenizer_to_huggingface.files(original), tmp_path)
    back = tokenizer_to_gguf.metadata(folder, rows=len(original["tokenizer.ggml.tokens"]), model="llama")
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in back.items()}
    write_model(tmp_path / "model.gguf", plain)
    oracle, read = LlamaCpp(tmp_path / "model.gguf"), Tokenizer.from_folder(folder)
    for text in TEXTS[2:11]:
        assert oracle.encode(text) == read.encode(text), text


def broken(change, tmp_path):
    files = tokenizer_to_huggingface.files(byte_level_metadata("qwen2"))
    change(files["tokenizer.json"])
    return written(files, tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("model"), ValueError, "tokenizer.json cannot be read"),
        (lambda t: t.update(pre_tokenizer=None), NotImplementedError, "cuts no words"),
        (
            lambda t: t["pre_tokenizer"]["pretokenizers"].__setitem__(
                0, {"type": "Split", "pattern": {"Regex": "o"}, "behavior": "Isolated", "invert": False}
            ),
            NotImplementedError, "as none of llama.cpp's tokenizers does",
        ),
        (lambda t: t["model"].update(merges=[]), NotImplementedError, "has no merges"),
        (
            lambda t: t.update(normalizer={"type": "Lowercase"}),
            NotImplementedError, "a GGUF file's tokenizer would make other tokens of .Hello world",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        tokenizer_to_gguf.metadata(broken(change, tmp_path), rows=2000, model="qwen2")


def test_more_tokens_than_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the embedding has 100 rows"):
        tokenizer_to_gguf.metadata(broken(lambda t: None, tmp_path), rows=100, model="qwen2")
