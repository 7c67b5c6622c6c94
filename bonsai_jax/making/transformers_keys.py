"""Keys of config.json that transformers and vLLM ask for and our readers do not: they see a model's settings
in its tensors, or take for granted what transformers has another default for."""

import re
from types import ModuleType
from typing import Any

from bonsai_jax.config import ModelConfig
from bonsai_jax.weights.specs import Description

# transformers' classes, where the rule of `architectures` gives another name. None: it has no class, or none
# for the text model alone.
CLASSES = {
    "bitnet": "BitNet",
    "chatglm": None,
    "ernie4_5_moe": "Ernie4_5_Moe",
    "granitemoe": "GraniteMoe",
    "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "internlm2": "InternLM2",  # of the model's own code, as in its folders and in vLLM
    "maple": None,
    "minicpm": "MiniCPM",  # likewise
    "minimax_m2": "MiniMaxM2",
    "qwen2_vl_text": None,
    "qwen3_vl_text": None,
    "smollm3": "SmolLM3",
}
# transformers' prefill of Nemotron-H takes no time step below this, its decoding and llama.cpp any. It takes
# the logarithm of it, so it is not 0.
SMALLEST_TIME_STEP = 1e-9


def architectures(model_type: str) -> list[str] | None:
    """The class that loads the model: qwen3_moe is Qwen3MoeForCausalLM. None: there is none.

    An underscore between digits stays: qwen3_5_text is Qwen3_5ForCausalLM.
    """
    words = re.split(r"_(?!\d)|(?<!\d)_", model_type.removesuffix("_text"))
    name = CLASSES.get(model_type, "".join(word.capitalize() for word in words))
    return None if name is None else [f"{name}ForCausalLM"]


def keys(config: ModelConfig, description: Description, module: ModuleType) -> dict[str, Any]:
    """The keys of a folder; those that the architecture reads come before them.

    description, module  of the GGUF file: which tensors it has, and which a file of its architecture may lack
    """
    present = {spec.field for spec, by_layer in description.tensors.items() if by_layer}
    optional = {spec.field for spec in module.TENSORS if spec.optional}
    made: dict[str, Any] = {}
    if "q_bias" in present | optional:
        made["attention_bias"] = "q_bias" in present
    if "o_bias" in optional:
        made["attention_out_bias"] = "o_bias" in present
    if norms := optional & {"q_norm", "q_head_norms"}:
        made["use_qk_norm"] = not norms.isdisjoint(present)
    if config.layer_vector:
        made["vocab_size_per_layer_input"] = config.vocab_size
    halves = [half for layer in config.layers for half in layer.halves]
    latent = next((half for half in halves if half.kind == "latent_attention"), None)
    if latent is not None:
        made |= {"num_key_value_heads": latent.num_heads, "q_lora_rank": None}
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    is_plain = len(mixers) == config.num_layers and all(mixer.kind == "attention" for mixer in mixers)
    if is_plain and all(mixer.window is None for mixer in mixers):
        made |= {"sliding_window": None, "layer_types": ["full_attention"] * config.num_layers}
    if any(half.kind == "short_conv" for half in halves) and config.experts is None:
        made["block_auto_adjust_ff_dim"] = False  # the width is that of the tensors
    mamba2 = next((half for half in halves if half.kind == "mamba2"), None)
    if mamba2 is not None:
        expand, rest = divmod(mamba2.inner, config.hidden)
        made |= {} if rest else {"mamba_expand": expand}
        made |= dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), "conv_bias" in present)
        made |= {"mamba_rms_norm": "group_norm" in present, "mamba_norm_before_gate": False}
        made["time_step_min"] = SMALLEST_TIME_STEP
    return made
