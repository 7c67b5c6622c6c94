"""A Hugging Face folder's tokenizer as the tokenizer.* keys of a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bonsai_jax.tokens import probes, tokenizer_gguf, tokenizer_huggingface
from bonsai_jax.tokens.pre_tokenizers import PRE_TOKENIZERS
from bonsai_jax.tokens.vocabulary import UNKNOWN, UNUSED, Vocabulary

KINDS_WITH_OWN_MODEL = ("gemma4",)  # architectures whose tokenizer.ggml.model is their name


def metadata(folder: Path, rows: int, model: str) -> dict[str, Any]:
    """The keys tokenizer.ggml.* and tokenizer.chat_template.

    folder  with tokenizer.json and the files beside it
    rows    of the embedding: so many tokens the file has, the last of them unused where the folder has fewer
    model   the architecture's name in GGUF files. It chooses among names of tokenizer.ggml.pre that mean the
            same
    Raises ValueError for files that are missing or broken, and NotImplementedError for a tokenizer whose
    tokens llama.cpp would not give.
    """
    vocabulary, path = tokenizer_huggingface.build(folder), folder / "tokenizer.json"
    if len(vocabulary.texts) > rows:
        raise ValueError(f"{path} has {len(vocabulary.texts)} tokens, and the embedding has {rows} rows")
    state = json.loads(tokenizer_huggingface.backend(vocabulary).to_str())["model"]
    if state["type"] != "BPE":
        raise NotImplementedError(f"{path} is a {state['type']} tokenizer; supported: BPE")
    if not state["merges"]:
        raise NotImplementedError(f"{path} has no merges, without which llama.cpp makes no tokens")
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in state["merges"]]
    made = _tokens(vocabulary, rows) | _special(vocabulary)
    if vocabulary.byte_level:
        made |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre(path, vocabulary, state, model)}
    elif model in KINDS_WITH_OWN_MODEL:
        made["tokenizer.ggml.model"] = model
    else:
        made |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        made["tokenizer.ggml.scores"] = _scores(made["tokenizer.ggml.tokens"], merges)
        made["tokenizer.ggml.add_space_prefix"] = vocabulary.space_prefix
    if "tokenizer.ggml.scores" not in made:
        made["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    ends = sorted(vocabulary.eos_ids - tokenizer_gguf.build(made).eos_ids)
    made |= {
        f"tokenizer.ggml.{name}_token_id": np.uint32(id)
        for name, id in zip(("eot", "eom"), ends, strict=False)
    }
    _check(path, vocabulary, made)
    return made


def _tokens(vocabulary: Vocabulary, rows: int) -> dict[str, Any]:
    texts, kinds = list(vocabulary.texts), list(vocabulary.kinds)
    texts += [""] * (rows - len(texts))
    kinds += [UNUSED] * (rows - len(kinds))
    texts = [
        text if kind != UNUSED or text else f"[PAD{id}]"
        for id, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    ]
    return {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": np.array(kinds, np.int32)}


def _special(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "padding": vocabulary.pad_id}
    unknown = vocabulary.kinds.find(UNKNOWN)
    ids["unknown"] = unknown if unknown >= 0 else None
    made: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": np.uint32(id) for name, id in ids.items() if id is not None
    }
    made["tokenizer.ggml.add_bos_token"] = vocabulary.add_bos
    made["tokenizer.ggml.add_eos_token"] = vocabulary.add_eos
    if vocabulary.chat_template is not None:
        made["tokenizer.chat_template"] = vocabulary.chat_template
    return made


def _scores(texts: list[str], merges: list[tuple[str, ...]]) -> np.ndarray:
    """A token's score is less the place of the first merge that makes it: the best is merged first."""
    first: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, place)
    return np.array([-float(first.get(text, len(merges))) for text in texts], np.float32)


def _pre(path: Path, vocabulary: Vocabulary, state: Mapping[str, Any], model: str) -> str:
    """The name of the rule by which llama.cpp cuts text into the same words."""
    backend = tokenizer_huggingface.backend(vocabulary)
    if backend.pre_tokenizer is None:
        raise NotImplementedError(f"{path} cuts no words, which byte-level tokenizers of llama.cpp do")
    texts = [
        text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        for text in probes.TEXTS
    ]
    words = [_words(backend.pre_tokenizer, text) for text in texts]
    alike = [
        name
        for name, pre in PRE_TOKENIZERS.items()
        if all(
            _words(tokenizer_gguf.splitter(pre), text) == own for text, own in zip(texts, words, strict=True)
        )
    ]
    ignores = bool(state.get("ignore_merges"))
    exact = [name for name in alike if PRE_TOKENIZERS[name].ignore_merges == ignores] or alike
    if not exact:
        raise NotImplementedError(
            f"{path} cuts text into words as none of llama.cpp's tokenizers does (tokenizer.ggml.pre)"
        )
    named = [name for name in exact if model.startswith(name) or name.startswith(model)]
    return (named or exact)[0]


def _words(splitter: Any, text: str) -> list[str]:
    return [word for word, _ in splitter.pre_tokenize_str(text)]


def _check(path: Path, vocabulary: Vocabulary, made: Mapping[str, Any]) -> None:
    got = tokenizer_gguf.build(made)
    if (text := probes.first_difference(vocabulary, got)) is not None:
        raise NotImplementedError(f"{path}: a GGUF file's tokenizer would make other tokens of {text[:40]!r}")
