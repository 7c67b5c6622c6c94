"""Adapters in the folders of PEFT (Hugging Face): adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]

scale = lora_alpha / r, with use_rslora lora_alpha / sqrt(r)
"""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bonsai_jax.adapters.contents import Contents, Pair
from bonsai_jax.weights.specs import text_name
from checkpoints import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
# Keys of adapter_config.json that change what is computed, and what is supported.
_REFUSED = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "whole matrices beside the adapter (modules_to_save)",
    "layer_replication": "replicated layers (layer_replication)",
    "fan_in_fan_out": "transposed matrices (fan_in_fan_out)",
    "lora_bias": "biases of adapters (lora_bias)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "target_parameters": "parameters of experts (target_parameters)",
    "use_qalora": "QA-LoRA (use_qalora)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
}


def read(folder: Path) -> Contents:
    """Raises CheckpointError for a folder that is broken, NotImplementedError for what is not supported."""
    import safetensors  # only files need it

    config = _config(folder)
    halves: dict[str, dict[str, np.ndarray]] = {}
    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="flax") as file:
            for key in file.keys():  # noqa: SIM118
                match = _KEY.fullmatch(key)
                if match is None:
                    raise NotImplementedError(
                        f"{folder}: tensor {key} is not supported; supported: lora_A and lora_B of matrices"
                    )
                name = text_name(match["module"] + ".weight")
                halves.setdefault(name, {})[match["half"]] = np.asarray(file.get_tensor(key))
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: the adapter's weights cannot be read: {error}") from error
    return Contents(str(folder), "huggingface", {n: _pair(folder, n, h, config) for n, h in halves.items()})


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG}: the adapter's settings cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise NotImplementedError(f"{folder}: peft_type is {kind!r}; supported: LORA")
    unlike = [text for key, text in _REFUSED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        unlike.append(f"trained biases (bias: {config['bias']!r})")
    if unlike:
        raise NotImplementedError(f"{folder}: {', '.join(unlike)} is not supported; merge it with PEFT")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise CheckpointError(
            f"{folder / CONFIG}: lora_alpha is {config.get('lora_alpha')!r}; a number is expected"
        )
    return config


def _pair(folder: Path, name: str, halves: dict[str, np.ndarray], config: dict[str, Any]) -> Pair:
    if halves.keys() != {"A", "B"} or any(half.ndim != 2 for half in halves.values()):
        raise CheckpointError(f"{folder}: {name}: lora_A and lora_B are expected, both matrices")
    rank, module = halves["A"].shape[0], name.removesuffix(".weight")
    patterns = config.get("alpha_pattern") or {}
    own = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    alpha = next(own, config["lora_alpha"])
    return Pair(halves["A"], halves["B"], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def write(folder: Path, contents: Contents) -> None:
    """What PEFT's PeftModel.from_pretrained reads. Where ranks or scales differ, they are in rank_pattern and
    alpha_pattern."""
    from safetensors.numpy import save_file  # only files need it

    usual = Counter((pair.rank, pair.scale * pair.rank) for pair in contents.pairs.values())
    (rank, alpha), _ = usual.most_common(1)[0]
    modules = {name.removesuffix(".weight"): pair for name, pair in contents.pairs.items()}
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for module, pair in modules.items():
        key = module.removeprefix("model.")  # what stands before it may differ
        if pair.rank != rank:
            patterns["rank_pattern"][key] = pair.rank
        if pair.scale * pair.rank != alpha:
            patterns["alpha_pattern"][key] = pair.scale * pair.rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted({module.rpartition(".")[-1] for module in modules}),
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        **patterns,
    }
    tensors = {}
    for module, pair in modules.items():
        for half, array in (("A", pair.a), ("B", pair.b)):
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = np.ascontiguousarray(array)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{WEIGHTS}.{os.getpid()}.unfinished"
    try:
        save_file(tensors, unfinished, {"format": "pt"})
        os.replace(unfinished, folder / WEIGHTS)
    finally:
        unfinished.unlink(missing_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
