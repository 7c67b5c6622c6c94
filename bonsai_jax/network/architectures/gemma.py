"""Gemma 1 (2B, 7B) and CodeGemma: a Gemma 2 without windows, without softcaps, and with norms before both
halves of a layer alone."""

import dataclasses

from bonsai_jax.network.architectures import gemma3

MODELS = "Gemma 1, CodeGemma"
TENSORS = tuple(
    dataclasses.replace(spec, huggingface="model.layers.{}.post_attention_layernorm.weight")
    if (spec.kind, spec.field) == ("mlp", "norm")
    else spec
    for spec in gemma3.PLAIN
    if spec.field != "post_norm"
)


def config_from_gguf(metadata, tensors):
    return gemma3.config_from_gguf(metadata, tensors)


def config_from_huggingface(metadata, tensors):
    # Its first files say gelu; transformers computes the approximation by tanh for both, as it was trained.
    names = {"gelu": "gelu_pytorch_tanh", None: "gelu_pytorch_tanh"}
    name = metadata.get("hidden_activation") or metadata.get("hidden_act")
    return gemma3.config_from_huggingface({**metadata, "hidden_activation": names.get(name, name)}, tensors)
