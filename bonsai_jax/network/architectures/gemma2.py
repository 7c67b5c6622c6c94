"""Gemma 2 (2B, 9B, 27B): a Gemma 3 without QK-norm, with softcaps on scores and logits, one rope, and a
window in every second layer."""

from bonsai_jax.network.architectures import gemma3

MODELS = "Gemma 2"
TENSORS = gemma3.PLAIN
WINDOW, SCORES, LOGITS = 4096, 50.0, 30.0  # where the file does not say
LARGEST = 46  # layers of the 27B


def config_from_gguf(metadata, tensors):
    arch = metadata["general.architecture"]
    defaults = {
        f"{arch}.attention.sliding_window": WINDOW,
        f"{arch}.attn_logit_softcapping": SCORES,
        f"{arch}.final_logit_softcapping": LOGITS,
        f"{arch}.rope.freq_base_swa": metadata.get(f"{arch}.rope.freq_base", gemma3.LOCAL_BASE),
    }
    return gemma3.config_from_gguf(defaults | dict(metadata), tensors, pattern=2, largest=LARGEST)


def config_from_huggingface(metadata, tensors):
    defaults = {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": SCORES,
        "final_logit_softcapping": LOGITS,
        "rope_local_base_freq": metadata.get("rope_theta", gemma3.LOCAL_BASE),
    }
    return gemma3.config_from_huggingface(defaults | dict(metadata), tensors, pattern=2)
