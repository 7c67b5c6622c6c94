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
@pytest.mark.parametrize(
    ("tied", "lengths", "options"),
    [
        (False, (1, 63, 64, 65, 130, 1000), {"prefill_tokens": 1024, "reproducible": True}),
        (True, (3, 12), {}),
    ],
    ids=["chunks", "tied"],
)
def test_prompts_of_every_length_are_answered_as_by_llama_cpp(name, tied, lengths, options, tmp_path):
    """Recurrent layers and layers of experts: one token to a thousand, in chunks of one size (256: one
    program), or several prompts at once; then steps of all rows."""
    path = as_file(tiny(name, tied), tmp_path / "tiny.gguf")
    model = bj.load(str(path))
    prompts, new = [np.random.default_rng(n).integers(0, 300, n).tolist() for n in lengths], 8
    rows = answers(path, model.tokenizer, prompts, new, context=2048)
    size = model.config.vocab_size
    options |= {"max_batch_size": len(lengths), "context": 1024, "logprobs": size}
    with bj.Engine(model, **options) as engine:
        asked = {"max_new_tokens": new, "ignore_eos": True, "logprobs": size}
        outputs = [handle.result() for handle in [engine.submit(p, GREEDY, **asked) for p in prompts]]
    kl = []
    for row, output in zip(rows, outputs, strict=True):
        assert output.tokens == row["tokens"]
        log_p = np.empty((new, size))
        np.put_along_axis(log_p, np.asarray(output.logprobs.ids), np.asarray(output.logprobs.top), 1)
        kl.append(top_kl(np.array(row["top_ids"]), np.array(row["top_logprobs"]), log_p).mean())
    print(f"KL by length of prompt: {dict(zip(lengths, kl, strict=True))}")
    assert max(kl) < 1e-6
