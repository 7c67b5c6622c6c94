"""Prompts of every length through models that keep more than pages, or choose experts, beside llama.cpp."""

import dataclasses

import numpy as np
import pytest

import bonsai_jax as bj
from checkpoints import Checkpoint, open_checkpoint
from tests.agreement import top_kl
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file


def tiny(model: str, tied: bool) -> Checkpoint:
    checkpoint = open_checkpoint(f"synth:{model}:f32")
    tensors = dict(checkpoint.tensors)
    if tied:
        head = tensors.pop("output.weight")
        tensors["token_embd.weight"] = dataclasses.replace(head, name="token_embd.weight")
    return dataclasses.replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-qwen3moe"])
@pytest.mark.parametrize("tied, lengths", [(False, (1, 63, 64, 65, 130, 1000)), (True, (3, 12))])
def test_prompts_of_every_length_are_answered_as_by_llama_cpp(name, tied, lengths, tmp_path):
    """Recurrent layers and layers of experts: rows of one token to a thousand in one batch, prefill in
    chunks, then steps."""
    path = as_file(tiny(name, tied), tmp_path / "tiny.gguf")
    model = bj.load(str(path))
    prompts, new = [np.random.default_rng(n).integers(0, 300, n).tolist() for n in lengths], 8
    rows = answers(path, model.tokenizer, prompts, new, context=2048)
    options = {"max_new_tokens": new, "ignore_eos": True, "logprobs": model.config.vocab_size}
    outputs = bj.generate(model, prompts, sampling=GREEDY, **options)
    kl = []
    for row, output in zip(rows, outputs, strict=True):
        assert output.tokens == row["tokens"]
        log_p = np.empty((new, model.config.vocab_size))
        np.put_along_axis(log_p, np.asarray(output.logprobs.ids), np.asarray(output.logprobs.top), 1)
        kl.append(top_kl(np.array(row["top_ids"]), np.array(row["top_logprobs"]), log_p).mean())
    print(f"KL by length of prompt: {dict(zip(lengths, kl, strict=True))}")
    assert max(kl) < 1e-6
