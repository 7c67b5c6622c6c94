"""Folders that convert writes, read by transformers: a tiny model that transformers has saved becomes a GGUF
file and a folder again, and has the same logits there.

    uv run --with torch --with transformers pytest -m slow tests/bonsai_jax/test_transformers_convert.py

Our own loader sees in the tensors much of what transformers must be told in config.json, so it would not
notice a key that is missing.
"""

import json

import numpy as np
import pytest

from bonsai_jax.making import convert, transformers_keys
from bonsai_jax.network import architectures
from checkpoints import open_checkpoint
from tests.bonsai_jax.test_transformers import (
    DELTA,
    EXPERTS,
    LLAMA3,
    MODELS,
    USUAL,
    WINDOWS,
    YARN,
    model,
    prompt,
)

LENGTHS = (1, 65, 200)
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
# Settings beside those of test_transformers.py that are not the defaults of transformers, or not those that
# tensors have there.
MORE = {
    "deepseek_v2:mscale": MODELS["deepseek_v2:lite"]
    | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v3:one_query_matrix": MODELS["deepseek_v3"] | {"q_lora_rank": None, "norm_topk_prob": False},
    "exaone4:windows_and_llama3": WINDOWS | {"rope_parameters": LLAMA3},
    "falcon_h1:norm": MODELS["falcon_h1"]
    | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False},
    "falcon_h1:narrow": MODELS["falcon_h1"] | {"mamba_n_heads": 6, "mamba_d_ssm": 96},
    "gemma2:usual_scale": WINDOWS | {"query_pre_attn_scalar": 16},
    "gemma3_text:usual_scale": WINDOWS | {"query_pre_attn_scalar": 16},
    "gemma4_text:wide": MODELS["gemma4_text:e2b"]
    | {"use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    "glm4:no_bias": {"attention_bias": False},
    "glm4_moe:bias": MODELS["glm4_moe"] | {"use_qk_norm": False, "attention_bias": True},
    "granitemoehybrid:rope": MODELS["granitemoehybrid"]
    | {"position_embedding_type": "rope", "mamba_conv_bias": False},
    "lfm2:wide": MODELS["lfm2"] | {"intermediate_size": 1024},
    "minimax_m2:part": MODELS["minimax_m2"]
    | {"rotary_dim": 8, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    "mistral:full": {"sliding_window": None},
    "nemotron_h:no_bias": MODELS["nemotron_h"] | {"use_conv_bias": False},
    "olmo3:yarn": WINDOWS
    | {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN | {"rope_theta": 5e5}}},
    "qwen3_5_text:theta": DELTA
    | {"rope_parameters": PLAIN | {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "qwen3_moe:not_normalized": EXPERTS | {"norm_topk_prob": False},
    "qwen3_moe:some_dense": EXPERTS | {"mlp_only_layers": [1]},
    "seed_oss:no_bias": {"attention_bias": False, "attention_out_bias": False},
    "seed_oss:all_biases": {"attention_bias": True, "attention_out_bias": True},
    "smollm3:fourth": {"no_rope_layers": [1, 1, 1, 0]},
}
# What GGUF files cannot say, so that convert refuses the folder.
REFUSED = {
    "deepseek_v2:lite": "mscale is",  # of the cosines alone; published models have 0.707 twice
    "gemma2": "scale is",  # keys of a head other than its width, but for Gemma 2 27B
    "gemma3_text": "scale is",  # likewise
    "mistral": "window is 24",  # llama.cpp's llama has none
    "qwen3:windows": "window is 24",  # likewise
    "qwen3_moe:some_dense": "channels is Mlp",
    "smollm3": "rope is None",  # of a layer that is not each fourth
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_transformers_reads_what_convert_writes(name, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(MODELS, name, (MODELS | MORE)[name])
    oracle = model(name)
    oracle.save_pretrained(source := tmp_path / "source")
    save_tokenizer(source)
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=f"cannot say what this model is: {REFUSED[name]}"):
            convert(source, tmp_path / "a.gguf", format="f32")
        return
    convert(source, tmp_path / "a.gguf", format="f32")
    convert(tmp_path / "a.gguf", folder := tmp_path / "folder", format="f32")
    made, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert open_checkpoint(folder).metadata["architectures"] == [type(made).__name__]
    for length in LENGTHS:
        with torch.no_grad():
            ids = torch.tensor([prompt(length)])
            want, got = (one.eval()(ids, use_cache=False).logits[0].numpy() for one in (oracle, made))
        error = np.abs(got - want).max() / want.std()
        print(f"{name}, {length} tokens: {error:.1e}")
        assert error < 1e-4


@pytest.mark.slow
def test_architectures_are_the_classes_of_transformers():
    pytest.importorskip("torch")
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    folder_names = architectures.FOLDER_NAMES
    names = [*folder_names, *(name for name in architectures.names() if name not in folder_names.values())]
    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    written = {name: transformers_keys.architectures(name) for name in names if name in known}
    assert written == {name: [known[name]] for name in written}
    assert len(written) > 40


def save_tokenizer(folder) -> None:
    """Bytes and one merge, of fewer tokens than the model has."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    first, *_ = alphabet = sorted(byte_level.alphabet())[: USUAL["vocab_size"] - 8]
    vocab = {text: id for id, text in enumerate([*alphabet, first + first])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[(first, first)]))
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
