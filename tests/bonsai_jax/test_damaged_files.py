"""Files that nobody here made: whatever is wrong with tensors and keys, there is one line that names it.

A damaged file either still makes a model, or raises CheckpointError or NotImplementedError when it is
described and planned, which is what loading and `inspect` do first. Keys of tokenizers are damaged in
test_tokenizer_files.py.
"""

import dataclasses
import random

import numpy as np
import pytest

from bonsai_jax.config import RunConfig
from bonsai_jax.network import architectures
from bonsai_jax.weights import plan
from checkpoints import Checkpoint, CheckpointError, open_checkpoint
from checkpoints.synth import MODELS
from tests.bonsai_jax.real_configs import HUGGING_FACE
from tests.bonsai_jax.test_keys import config_of

TINY = [name for name in MODELS if name.startswith("tiny-")]
ABSURD = (  # 0 first: the everyday sample has the first ones more often
    *(0, -1, "", "x", 10**12, 2**31 - 1, 1, 3, 0.5, float("nan"), float("inf"), True, None, 10**400),
    *([], [0], [1, 2], ["a"], {}, {"a": 1}, np.zeros(3, np.int32), np.array([], np.float32)),
    *(np.uint64(2**63), np.float32("nan"), "x\n" * 3000),
)


def with_metadata(checkpoint: Checkpoint, metadata: dict) -> Checkpoint:
    return dataclasses.replace(checkpoint, metadata=metadata)


def with_tensors(checkpoint: Checkpoint, tensors: dict) -> Checkpoint:
    return dataclasses.replace(checkpoint, tensors=tensors)


def key_damages(checkpoint: Checkpoint):
    """(name, checkpoint) for each key that is missing, has another name, or another value."""
    metadata = checkpoint.metadata
    for key in metadata:
        if key.startswith("tokenizer."):
            continue
        rest = {k: v for k, v in metadata.items() if k != key}
        yield key, with_metadata(checkpoint, rest)
        yield key, with_metadata(checkpoint, rest | {f"{key}_of_tomorrow": metadata[key]})
        for value in ABSURD:
            yield key, with_metadata(checkpoint, metadata | {key: value})


def tensor_damages(checkpoint: Checkpoint):
    """(name, checkpoint) for each tensor that is missing, is there twice, or has another name, shape or
    format."""
    tensors = checkpoint.tensors
    for name, tensor in tensors.items():
        rest = {k: v for k, v in tensors.items() if k != name}
        yield name, with_tensors(checkpoint, rest)
        for other in (f"{name}.x", name.replace("blk.1.", "blk.99."), name.replace("weight", "bias"), ""):
            if other not in tensors:
                yield name, with_tensors(checkpoint, rest | {other: tensor})
        yield name, with_tensors(checkpoint, tensors | {f"{name}.1": tensor})
        shapes = ((), (1,), tensor.shape[::-1], (*tensor.shape, 2), tuple(2 * n for n in tensor.shape))
        for shape in shapes:
            changed = dataclasses.replace(tensor, shape=shape)
            yield name, with_tensors(checkpoint, tensors | {name: changed})
        changed = dataclasses.replace(tensor, format="q9_9")
        yield name, with_tensors(checkpoint, tensors | {name: changed})


def error_of(damaged: Checkpoint) -> str | None:
    """The error's text, None where the file still makes a model. Other exceptions fail the test."""
    try:
        plan.plan(architectures.describe(damaged), RunConfig())
    except (CheckpointError, NotImplementedError) as error:
        return str(error)
    return None


def check(damages, source: str) -> int:
    errors = 0
    for name, damaged in damages:
        try:
            message = error_of(damaged)
        except Exception as error:
            error.add_note(f"{source}: {name} was damaged")
            raise
        if message is not None:
            errors += 1
            assert message.startswith(source) and "\n" not in message and len(message) < 1000, (name, message)
            assert "Error" not in message and "Traceback" not in message, (name, message)
    return errors


@pytest.mark.parametrize("name", TINY)
def test_a_damaged_file_ends_in_one_line(name):
    checkpoint = open_checkpoint(f"synth:{name}:f32")
    assert error_of(checkpoint) is None
    draw = random.Random(name)
    keys, tensors = list(key_damages(checkpoint)), list(tensor_damages(checkpoint))
    damages = draw.sample(keys, 80) + draw.sample(tensors, 50)
    assert check(damages, checkpoint.source) > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_damage_ends_in_one_line(name):
    checkpoint = open_checkpoint(f"synth:{name}:f32")
    check(key_damages(checkpoint), checkpoint.source)
    for tensor, damaged in tensor_damages(checkpoint):
        message = error_of(damaged)
        if message is not None and tensor not in damaged.tensors and "has no place" not in message:
            assert "missing" in message and (tensor in message or "embed" in tensor or "embd" in tensor), (
                message
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_random_damages_together_end_in_one_line(name):
    """Several keys and tensors at once."""
    checkpoint = open_checkpoint(f"synth:{name}:f32")
    draw = random.Random(name)
    keys = [key for key in checkpoint.metadata if not key.startswith("tokenizer.")]
    damages = []
    for _ in range(300):
        metadata, tensors = dict(checkpoint.metadata), dict(checkpoint.tensors)
        for key in draw.sample(keys, draw.randint(1, 4)):
            metadata[key] = draw.choice(ABSURD)
        for tensor in draw.sample(list(tensors), draw.randint(0, 3)):
            del tensors[tensor]
        damages.append(("several", with_tensors(with_metadata(checkpoint, metadata), tensors)))
    check(damages, checkpoint.source)


def config_damages(metadata: dict):
    """(key, metadata) for each key of a config.json, also of an object in it, that is missing or has another
    value."""
    for key, value in metadata.items():
        yield key, {k: v for k, v in metadata.items() if k != key}
        for odd in ABSURD:
            yield key, metadata | {key: odd}
        if isinstance(value, dict):
            for inner, changed in config_damages(value):
                yield f"{key}.{inner}", metadata | {key: changed}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_damaged_config_json_ends_in_one_line(name):
    errors = 0
    for key, metadata in config_damages(HUGGING_FACE[name]):
        try:
            config_of("huggingface", metadata)
        except (CheckpointError, NotImplementedError) as error:
            errors += 1
            message = str(error)
            assert message.startswith("file") and "\n" not in message and len(message) < 1000, (key, message)
        except Exception as error:
            error.add_note(f"{name}: {key} was damaged")
            raise
    assert errors > 60
