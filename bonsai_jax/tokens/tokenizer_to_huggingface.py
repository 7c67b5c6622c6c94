"""A GGUF file's tokenizer as the files of a Hugging Face folder."""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bonsai_jax.tokens import probes, tokenizer_gguf, tokenizer_huggingface
from bonsai_jax.tokens.vocabulary import CONTROL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary

_FILLED = re.compile(r"\[(PAD|EMPTY_)\d+\]")  # names that converters give to ids without a token


def files(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """tokenizer.json, tokenizer_config.json and generation_config.json, of a GGUF file's tokenizer.* keys.

    Raises ValueError for keys that are missing or contradict each other, and NotImplementedError for a
    tokenizer whose tokens a tokenizer.json would not give.
    """
    vocabulary = tokenizer_gguf.build(metadata)
    made = {
        "tokenizer.json": _tokenizer(vocabulary, str(metadata["tokenizer.ggml.model"])),
        "tokenizer_config.json": _config(vocabulary),
        "generation_config.json": _generation(vocabulary),
    }
    with tempfile.TemporaryDirectory(prefix="bonsai-jax-") as folder:
        for name, content in made.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        got = tokenizer_huggingface.build(Path(folder))
    if (text := probes.first_difference(vocabulary, got)) is not None:
        raise NotImplementedError(
            f"a tokenizer.json would make other tokens of {text[:40]!r} than the GGUF file"
        )
    return made


def _tokenizer(vocabulary: Vocabulary, model: str) -> dict[str, Any]:
    state = json.loads(tokenizer_gguf.backend(vocabulary).to_str())
    texts, kinds = vocabulary.texts, vocabulary.kinds
    filled = {id for id, text in enumerate(texts) if kinds[id] == UNUSED and _FILLED.fullmatch(text)}
    # Special tokens are in the vocabulary too, so that they have their ids wherever these lie.
    state["model"]["vocab"] = {text: id for id, text in enumerate(texts) if id not in filled}
    state["added_tokens"] = [
        {
            "id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kinds[id] != USER_DEFINED,
        }
        for id, text in enumerate(texts)
        if kinds[id] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]  # fmt: skip
    if vocabulary.byte_level:
        state["decoder"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
    else:
        state |= _spaces(vocabulary)
        unknown = kinds.find(UNKNOWN)
        state["model"]["unk_token"] = texts[unknown] if unknown >= 0 else None
    if model == "gemma4":  # a run of line breaks is a word, and whole where it is a token
        split = {"type": "Split", "pattern": {"Regex": r"\n+"}, "behavior": "Isolated", "invert": False}
        state["pre_tokenizer"] = split
        state["model"]["ignore_merges"] = True
    state["post_processor"] = _around(vocabulary)
    return state


def _spaces(vocabulary: Vocabulary) -> dict[str, Any]:
    """How a space becomes U+2581 and back."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    prefix = vocabulary.space_prefix
    before = [{"type": "Prepend", "prepend": SPACE}] * prefix
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
    }


def _around(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """What puts BOS and EOS around a text; None: nothing does."""
    before = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
    after = [vocabulary.eos_id] if vocabulary.add_eos and vocabulary.eos_id is not None else []
    if not before + after:
        return None

    def special(id: int, number: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": vocabulary.texts[id], "type_id": number}}

    def around(name: str, number: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": number}}
        return [*(special(id, number) for id in before), text, *(special(id, number) for id in after)]

    names = {id: vocabulary.texts[id] for id in before + after}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]} for id, text in names.items()},
    }


def _config(vocabulary: Vocabulary) -> dict[str, Any]:
    unknown = vocabulary.kinds.find(UNKNOWN)
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "pad": vocabulary.pad_id}
    ids["unk"] = unknown if unknown >= 0 else None
    made: dict[str, Any] = {
        f"{name}_token": vocabulary.texts[id] for name, id in ids.items() if id is not None
    }
    made |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    if vocabulary.chat_template is not None:
        made["chat_template"] = vocabulary.chat_template
    return made


def _generation(vocabulary: Vocabulary) -> dict[str, Any]:
    first = [vocabulary.eos_id] if vocabulary.eos_id is not None else []
    ends = [*first, *sorted(vocabulary.eos_ids - {*first})]
    ids = {
        "bos": vocabulary.bos_id,
        "eos": ends[0] if len(ends) == 1 else ends or None,
        "pad": vocabulary.pad_id,
    }
    return {f"{name}_token_id": id for name, id in ids.items() if id is not None}
