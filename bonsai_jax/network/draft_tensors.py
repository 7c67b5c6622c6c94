"""The tensors of a draft layer (MTP): a layer as the model has them, and what joins it to the model."""

import dataclasses

from bonsai_jax.weights.specs import Spec


def draft_layer(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """Specs of a draft layer with the tensors of such layers, as if it were the only one
    (specs.Description.draft)."""

    def named(name: str | None) -> str:
        return str(name).replace("model.", "mtp.", 1)

    def renamed(spec: Spec) -> Spec:
        fused = spec.fused and dataclasses.replace(spec.fused, huggingface=named(spec.fused.huggingface))
        return dataclasses.replace(spec, huggingface=named(spec.huggingface), fused=fused)

    return (
        *map(renamed, specs),
        Spec("join", "blk.0.nextn.eh_proj.weight", "mtp.fc.weight", ("hidden", "draft_inputs")),
        Spec("embed_norm", "blk.0.nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", ("hidden",)),
        Spec("hidden_norm", "blk.0.nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", ("hidden",)),
        Spec("norm", "blk.0.nextn.shared_head_norm.weight", "mtp.norm.weight", ("hidden",), optional=True),
    )
