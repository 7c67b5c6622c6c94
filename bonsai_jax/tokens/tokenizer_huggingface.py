"""Tokenizers from a Hugging Face folder: tokenizer.json and the files beside it."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bonsai_jax.tokens.vocabulary import (
    BYTE,
    BYTE_TOKEN,
    CONTROL,
    END_TEXTS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    marks,
)


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is a {type(content).__name__}, expected an object")
    return content


@contextlib.contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Whatever a damaged file makes our code or the package tokenizers raise, as ValueError. A panic of
    tokenizers, which is written in Rust, is no Exception."""
    try:
        yield
    except (ValueError, NotImplementedError, MemoryError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
        raise


@dataclasses.dataclass(frozen=True, eq=False)
class _Encoder:
    """Vocabulary.encoder of a tokenizer.json. backend: a tokenizers.Tokenizer."""

    path: Path
    backend: Any

    @functools.cached_property
    def without_special(self) -> Any:
        copy = type(self.backend).from_str(self.backend.to_str())
        copy.encode_special_tokens = True  # encode their names as text
        return copy

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled `without_special` would be an ordinary one
        return _Encoder, (self.path, self.backend)

    def __call__(self, text: str, parse_special: bool) -> list[int]:
        with _errors_name(self.path):
            backend = self.backend if parse_special else self.without_special
            return backend.encode(text, add_special_tokens=False).ids


def backend(vocabulary: Vocabulary) -> Any:
    """The tokenizers.Tokenizer of a vocabulary that `build` made."""
    encoder: Any = vocabulary.encoder
    return encoder.backend


def build(folder: Path) -> Vocabulary:
    """See Tokenizer.from_folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; no other tokenizer file of a Hugging Face folder is read")
    with _errors_name(path):
        return _build(folder, path)


def _build(folder: Path, path: Path) -> Vocabulary:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    byte_level, space_prefix = _decoder_kind(path, backend)
    texts, kinds = _huggingface_vocabulary(path, backend, byte_level)

    config = _json(folder / "tokenizer_config.json")
    ids = {name: _token_id(folder, backend, config, name) for name in ("bos", "eos", "pad")}
    ends = {ids["eos"], *(backend.token_to_id(text) for text in END_TEXTS)}
    ends = {id for id in ends if id is not None and (id == ids["eos"] or kinds[id] == CONTROL)}
    ends -= {backend.token_to_id(text) for text in marks(backend.get_vocab())}
    for name in ("generation_config.json", "config.json"):
        listed = _json(folder / name).get("eos_token_id") or []
        listed = listed if isinstance(listed, list) else [listed]
        ends |= {id for id in listed if type(id) is int and 0 <= id < 2**31}

    added = backend.encode("").ids  # tokens that the post-processor puts around a text
    add_bos = added[:1] == [ids["bos"]]
    add_eos = added[add_bos:] == [ids["eos"]]
    if len(added) != add_bos + add_eos:
        names = [texts[id] for id in added]
        raise NotImplementedError(
            f"{path} puts {names} around a text; supported: BOS before it and EOS after it"
        )

    return Vocabulary(
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
        encoder=_Encoder(path, backend),
    )


def _decoder_kind(path: Path, backend: Any) -> tuple[bool, bool]:
    """(byte_level, space_prefix), as the decoder of tokenizer.json implies them."""
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
        kinds[id] = BYTE if not byte_level and BYTE_TOKEN.fullmatch(text) else NORMAL
    for id, token in backend.get_added_tokens_decoder().items():
        kinds[id] = CONTROL if token.special else USER_DEFINED
    unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
    if unknown is not None:
        kinds[unknown] = UNKNOWN
    return texts, bytes(kinds)


def _token_id(folder: Path, backend: Any, config: dict[str, Any], name: str) -> int | None:
    """The id of bos_token, eos_token or pad_token in tokenizer_config.json."""
    token = config.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    id = backend.token_to_id(token) if isinstance(token, str) else None
    if id is None:
        raise ValueError(f"{folder}/tokenizer_config.json: {name}_token = {token!r} is not in tokenizer.json")
    return id


def _huggingface_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja if it exists, else the template in tokenizer_config.json; of several, the
    default."""
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
