"""Flags as other programs name them: llama.cpp, mlx-lm, vLLM and OpenAI's API. Hidden from --help."""

ALIASES = {
    "temperature": "temp",
    "max-tokens": "max-new-tokens",
    "max_tokens": "max-new-tokens",
    "max_new_tokens": "max-new-tokens",
    "max-completion-tokens": "max-new-tokens",
    "max_completion_tokens": "max-new-tokens",
    "n-predict": "max-new-tokens",
    "predict": "max-new-tokens",
    "ctx-size": "ctx",
    "ctx_size": "ctx",
    "context": "ctx",
    "max-kv-size": "ctx",
    "max-model-len": "ctx",
    "num-ctx": "ctx",
    "num_ctx": "ctx",
    "top_k": "top-k",
    "top_p": "top-p",
    "min_p": "min-p",
    "repetition-penalty": "repeat-penalty",
    "repetition_penalty": "repeat-penalty",
    "repeat_penalty": "repeat-penalty",
    "presence_penalty": "presence-penalty",
    "frequency_penalty": "frequency-penalty",
    "system-prompt": "system",
    "json-schema-file": "json-schema",
    "grammar-file": "grammar",
    "hf-repo": "model",
    "model-draft": "draft",
    "max-num-seqs": "batch-size",
    "tensor-parallel-size": "tensor-parallel",
    "data-parallel-size": "data-parallel",
    # Flags of several letters after one dash, which stays before the name.
    "hf": "-model",
    "md": "-draft",
    "sys": "-system",
}


def our_name(name: str) -> str:
    """A flag's name, without its dashes, as our commands have it."""
    return ALIASES.get(name, name)
