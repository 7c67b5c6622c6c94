"""OpenAI's embeddings: POST /v1/embeddings. One unit vector for each text (research/embeddings.py).

The request may name the pooling, "mean" or "last"; the answer says which it is.
"""

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from jaxtyping import Float

from bonsai_jax import choices
from bonsai_jax.protocols import fields
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.openai import error

__all__ = ["PATH", "EmbeddingRequest", "error", "request", "whole"]

PATH = "/v1/embeddings"
MOST_INPUTS = 2048


@dataclasses.dataclass(frozen=True)
class EmbeddingRequest:
    """inputs: texts and lists of token ids. packed: vectors are sent as base64 of their float32.
    dimensions, pooling: None where the body does not say."""

    inputs: list[Any]
    packed: bool
    dimensions: int | None
    pooling: choices.Pooling | None


FIELDS: dict[str, fields.Check] = {
    "input": fields.prompt,
    "model": fields.text,
    "encoding_format": fields.one_of("float", "base64"),
    "dimensions": fields.between(1, fields.MOST_NEW),
    "pooling": fields.one_of(*get_args(choices.Pooling)),
    "user": fields.text,
}


def request(body: Mapping[str, Any], *, strict: bool = False) -> EmbeddingRequest:
    """The request in a body. Raises FieldError, which names the field."""
    given = fields.read(body, FIELDS, strict=strict, path=PATH)
    inputs = given.get("input")
    if inputs is None:
        raise FieldError("input", "missing")
    if len(inputs) > MOST_INPUTS:
        raise FieldError("input", f"{len(inputs)} texts; {MOST_INPUTS} are taken at most")
    if "" in inputs:
        raise FieldError("input", "a text is empty")
    packed = given.get("encoding_format") == "base64"
    return EmbeddingRequest(inputs, packed, given.get("dimensions"), given.get("pooling"))


def whole(
    request: EmbeddingRequest, vectors: Float[np.ndarray, "N H"], model: str, pooling: str, tokens: int
) -> dict[str, Any]:
    """The list of embeddings. tokens: of all texts."""
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(own) if request.packed else own.tolist()}
        for index, own in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "pooling": pooling, "usage": usage}


def _packed(vector: Float[np.ndarray, "H"]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
