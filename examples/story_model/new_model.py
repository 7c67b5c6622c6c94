"""A tokenizer of the stories' own, and a GGUF file of random weights to begin with."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from checkpoints import Tensor, write_gguf

END = "<|endoftext|>"  # between two stories, and before the first
CONTROL, NORMAL = 3, 1  # kinds of tokens, as llama.cpp numbers them
ABOUT = {
    "general.name": "Stories",
    "general.description": "Continues simple stories in English. Trained from scratch in Q1_0, on stories "
    "that SmolLM2-135M-Instruct wrote: examples/story_model of bonsai-jax.",
    "general.license": "apache-2.0",
    "general.languages": ["en"],
}


def train_tokenizer(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE over GPT-2's words, which GGUF files call "gpt-2". Its first token is END."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_metadata(tokenizer: tokenizers.Tokenizer, rows: int) -> dict[str, Any]:
    """The tokenizer's keys in a GGUF file. rows: of the embedding; tokens without a text fill it up."""
    state = json.loads(tokenizer.to_str())["model"]
    texts = sorted(state["vocab"], key=state["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    unused = [f"[PAD{id}]" for id in range(len(texts), rows)]
    kinds = [CONTROL, *[NORMAL] * (len(texts) - 1), *[5] * len(unused)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts + unused,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def write_new_model(
    path: Path, tokenizer: tokenizers.Tokenizer, sizes: Mapping[str, int], seed: int = 0
) -> None:
    """A Qwen3 of random weights: QK-norm keeps attention tame at the learning rates that one bit wants.

    sizes   vocab, layers, hidden, ffn, heads, kv_heads, head_dim, context
    Matrices are N(0, 1 / columns), which keeps variances; those that write to the residual stream are
    smaller by sqrt(2 layers) (GPT-2). The embedding, N(0, 0.02^2), is the output matrix too.
    """
    vocab, hidden, ffn, layers = (sizes[name] for name in ("vocab", "hidden", "ffn", "layers"))
    q, kv = (sizes[name] * sizes["head_dim"] for name in ("heads", "kv_heads"))
    keys = {
        "block_count": layers, "embedding_length": hidden, "feed_forward_length": ffn, "vocab_size": vocab,
        "context_length": sizes["context"], "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.head_count": sizes["heads"], "attention.head_count_kv": sizes["kv_heads"],
        "attention.key_length": sizes["head_dim"], "attention.value_length": sizes["head_dim"],
    }  # fmt: skip
    metadata = {"general.architecture": "qwen3", **ABOUT}
    metadata |= {f"qwen3.{key}": value for key, value in keys.items()}
    metadata |= tokenizer_metadata(tokenizer, vocab)
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, std: float) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(std)

    def tensors():
        yield "token_embd", matrix(vocab, hidden, 0.02)
        for layer in range(layers):
            shapes = {
                "attn_q": (q, hidden),
                "attn_k": (kv, hidden),
                "attn_v": (kv, hidden),
                "attn_output": (hidden, q),
            }
            shapes |= {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
            for name, shape in shapes.items():
                writes = name in ("attn_output", "ffn_down")
                yield (
                    f"blk.{layer}.{name}",
                    matrix(*shape, (shape[1] * (2 * layers if writes else 1)) ** -0.5),
                )
            for name in ("attn_norm", "ffn_norm"):
                yield f"blk.{layer}.{name}", np.ones(hidden, np.float32)
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{layer}.{name}", np.ones(sizes["head_dim"], np.float32)
        yield "output_norm", np.ones(hidden, np.float32)

    write_gguf(
        path, metadata, (Tensor(f"{name}.weight", "f32", x.shape, x.view(np.uint8)) for name, x in tensors())
    )
