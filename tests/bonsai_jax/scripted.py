"""A model that writes given texts: a logits processor leaves it no choice.

Its limit of new tokens says which text an answer is: with a limit of STRIDE it is the first text, with
twice as many the second, and so on. The first may have more than STRIDE tokens, and is cut off then.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj

STRIDE = 160


def limit(script: int) -> int:
    """The limit of new tokens with which a model writes this script."""
    return STRIDE * (script + 1)


def scripts(model: bj.Model, texts: Sequence[str]) -> Any:
    """A logits processor."""
    end = min(model.tokenizer.eos_ids)
    table = np.full((len(texts), STRIDE), end, np.int32)
    for row, text in zip(table, texts, strict=True):
        ids = model.tokenizer.encode(text, add_special=False)
        assert len(ids) < STRIDE or text is texts[0], f"{len(ids)} tokens: {text}"
        row[: len(ids)] = ids[:STRIDE]
    forced = jnp.asarray(table)

    def processor(logits, state):
        script = jnp.clip((state.remaining - 1) // STRIDE, 0, len(texts) - 1)
        at = jnp.clip(STRIDE * (script + 1) - state.remaining, 0, STRIDE - 1)
        token = forced[script, at]
        return jnp.where(jnp.arange(logits.shape[-1]) == token[:, None], 0.0, -jnp.inf)

    return processor


def with_template(model: bj.Model, template: str) -> bj.Model:
    return dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, chat_template=template))
