"""Tiny models as Hugging Face folders beside the GGUF files that they are, of every test that has both."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bonsai_jax.making import key_search
from bonsai_jax.making.stretched import as_gguf, with_ropes
from bonsai_jax.network import architectures
from bonsai_jax.tokens import tokenizer_to_huggingface
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, Tensor, open_checkpoint
from tests.bonsai_jax import (
    test_deepseek2,
    test_families_with_experts,
    test_gemma3,
    test_gemma4,
    test_gpt_oss,
    test_lfm2,
    test_mamba2_models,
    test_mixtures,
    test_other_norms,
    test_qwen3moe,
    test_relatives,
)
from tests.bonsai_jax.tiny_files import as_huggingface


class Case(NamedTuple):
    """A folder and the GGUF file that it is: functions that make them, neither with weights on the disk."""

    folder: Callable[[], Checkpoint]
    gguf: Callable[[], Checkpoint]


def _cases() -> dict[str, Case]:
    cases = {}

    def add(module, names, folder, gguf) -> None:
        for name in names:
            key = f"{module.__name__.rpartition('test_')[-1]}: {name}"
            cases[key] = Case(functools.partial(folder, name), functools.partial(gguf, name))

    relatives, families, mamba2 = test_relatives, test_families_with_experts, test_mamba2_models
    add(relatives, relatives.FOLDERS, relatives.folder, relatives.file)
    add(families, families.FOLDERS, _family, families.file)
    add(test_gemma4, ("31b", "26b-a4b", "e2b"), test_gemma4.folder, test_gemma4.file)
    add(test_gemma3, ("tiny-gemma3", "tiny-gemma2"), test_gemma3.folder, _synth)
    add(test_deepseek2, test_deepseek2.FOLDERS, test_deepseek2.folder, test_deepseek2.file)
    add(
        test_lfm2,
        ["lfm2"],
        lambda _: as_huggingface(test_lfm2.file(), test_lfm2.HUGGING_FACE),
        lambda _: test_lfm2.file(),
    )
    add(mamba2, ["nemotron_h_moe"], _nemotron, mamba2.file)
    add(mamba2, ["falcon-h1"], lambda _: mamba2.falcon_folder(), mamba2.file)
    add(test_gpt_oss, ["gpt-oss"], lambda _: test_gpt_oss.folder(), _gpt_oss)
    norms = [name for name in test_other_norms.HUGGING_FACE if name not in test_other_norms.LARGE]
    add(test_other_norms, norms, test_other_norms.folder, test_other_norms.gguf_file)
    mixtures = [name for name in test_mixtures.FOLDERS if name != "tiny-maple"]  # whose limit no folder says
    add(
        test_mixtures,
        mixtures,
        functools.partial(test_mixtures.folder, stacked=False),
        test_mixtures.checkpoint,
    )
    add(test_qwen3moe, ["qwen3moe"], lambda _: test_qwen3moe.folder(), lambda _: _synth("tiny-qwen3moe"))
    return cases


def _family(name: str) -> Checkpoint:
    make = as_huggingface if name == "hunyuan-moe" else test_families_with_experts.granite_folder
    return make(test_families_with_experts.file(name), test_families_with_experts.FOLDERS[name])


def _nemotron(name: str) -> Checkpoint:
    own = test_mamba2_models
    return as_huggingface(own.file(name), own.EXPERTS_FOLDER, decay=lambda a: np.log(-a))


def _gpt_oss(name: str) -> Checkpoint:
    exact, packed = (open_checkpoint(f"synth:tiny-gpt-oss:{format}") for format in ("f32", "mxfp4"))
    experts = {own: t for own, t in packed.tensors.items() if own.endswith("_exps.weight")}
    return dataclasses.replace(exact, tensors={**exact.tensors, **experts})


def _synth(name: str) -> Checkpoint:
    return open_checkpoint(f"synth:{name}:f32")


CASES = _cases()


@functools.cache
def _tokenizer_files() -> dict[str, str]:
    files = tokenizer_to_huggingface.files(open_checkpoint("synth:tiny-llama:f32").metadata)
    return {name: json.dumps(content) for name, content in files.items()}


def with_tokenizer(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The same folder, with a tokenizer in a folder on the disk."""
    folder.mkdir()
    for name, content in _tokenizer_files().items():
        (folder / name).write_text(content)
    return dataclasses.replace(checkpoint, source=str(folder), folder=folder)


def assert_one_model(a: Checkpoint, b: Checkpoint) -> None:
    """Two files of one naming are the same model: its settings, and each tensor, to the bit where folders and
    GGUF files have the same values."""
    one, other = architectures.describe(a), architectures.describe(b)
    plain = [
        with_ropes(d.config, lambda rope: dataclasses.replace(rope, truncate=True)) for d in (one, other)
    ]
    plain = [with_ropes(config, lambda rope: as_gguf(rope)[0]) for config in plain]
    assert key_search.difference(*plain) == ""
    multiplied = one.config.architecture in ("falcon-h1", "falcon_h1")
    for spec, by_layer in one.tensors.items():
        assert by_layer.keys() == other.tensors[spec].keys(), spec.field
        for layer, source in by_layer.items():
            x, y = (np.asarray(t.data).reshape(-1) for t in (source, other.tensors[spec][layer]))
            if spec.from_huggingface is None and not multiplied:
                np.testing.assert_array_equal(x, y, err_msg=f"{spec.field} {layer}")
            else:
                x, y = x.view(np.float32), y.view(np.float32)
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-7, err_msg=f"{spec.field} {layer}")


def drawn(checkpoint: Checkpoint) -> Checkpoint:
    """With the arrays of random tensors in place of their description."""
    tensors = {
        name: Tensor(name, t.format, t.shape, np.asarray(blocks(t))) for name, t in checkpoint.tensors.items()
    }
    return dataclasses.replace(checkpoint, tensors=tensors)
