"""llama.cpp, in this process, as an oracle for whole models: greedy tokens and the log-probabilities behind
them."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import xllamacpp

from checkpoints import Checkpoint, Tensor, write_gguf
from pallas_kernels import dequantize, from_blocks

TOP = 20


class LlamaCpp:
    """A GGUF file run by llama.cpp with a float32 cache and without flash attention.

    Flash attention on the CPU keeps values in float16 whatever the cache is: log-probabilities then differ by
    2e-3 from an exact forward, and by 4e-5 without it.
    """

    def __init__(self, path: Path, context: int = 1024, lora: Mapping[Path, float] | None = None):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.n_parallel = 1
        adapters = [xllamacpp.CommonAdapterLoraInfo(str(path), scale) for path, scale in (lora or {}).items()]
        params.lora_adapters = adapters
        params.warmup = False
        params.verbosity = 0
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # others wait by spinning
        self.server = xllamacpp.Server(params)

    def log_probability(self, prompt_ids: Sequence[int], token: int) -> float:
        """Of one token behind a prompt; it must end with whole characters, see `greedy`."""
        request = {
            "prompt": [int(i) for i in prompt_ids],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "logit_bias": [[int(token), 1000.0]],
            "cache_prompt": True,
        }
        (drawn,) = self.server.handle_completions(request)["choices"][0]["logprobs"]["content"]
        assert drawn["id"] == token
        return drawn["logprob"]

    def greedy(self, prompt_ids: list[int], n: int, *, readable: int, text: Sequence[int] = ()) -> dict:
        """The n tokens that greedy decoding draws after the prompt, also beyond an end token, with the 20
        likeliest behind each: a row for `agreement`.

        readable  id of any token whose text is whole characters. The server keeps back tokens that end within
                  a character, with their log-probabilities; so each step is a request for one token, biased
                  to be this one: the log-probabilities it reports are those before the bias.
        text      tokens to go on with, as long as there are any, instead of those that decoding draws
        """
        ids = list(prompt_ids)
        top_ids, top_logprobs = [], []
        for i in range(n):
            request = {
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": TOP,
                "logit_bias": [[readable, 1000.0]],
            }
            reply = self.server.handle_completions(request | {"cache_prompt": True})
            (drawn,) = reply["choices"][0]["logprobs"]["content"]
            assert drawn["id"] == readable
            top_ids.append([t["id"] for t in drawn["top_logprobs"][:TOP]])
            top_logprobs.append([t["logprob"] for t in drawn["top_logprobs"][:TOP]])
            ids.append(text[i] if i < len(text) else top_ids[-1][0])
        top_logprobs = np.array(top_logprobs).round(5).tolist()
        return {
            "prompt": prompt_ids,
            "tokens": ids[len(prompt_ids) :],
            "top_ids": top_ids,
            "top_logprobs": top_logprobs,
        }


def write_float32(checkpoint: Checkpoint, path: Path) -> None:
    """The same model with every tensor decoded to F32, on which llama.cpp does not quantize activations."""

    def decoded(t: Tensor) -> Tensor:
        values = np.asarray(_dequantized(np.atleast_2d(t.data), t.format)).reshape(t.shape)
        return Tensor(t.name, "f32", t.shape, values.view(np.uint8).reshape(*t.shape[:-1], -1))

    metadata = dict(checkpoint.metadata) | {"general.file_type": np.uint32(0)}
    write_gguf(path, metadata, (decoded(t) for t in checkpoint.tensors.values()))


@functools.partial(jax.jit, static_argnames="format")  # outside of jit each operation would be compiled alone
def _dequantized(blocks, format: str) -> jax.Array:
    return dequantize(from_blocks(blocks, format))
