"""A model's static figures: the kernels that run it, and the bytes that a decode step moves."""

import dataclasses
from collections.abc import Sequence

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network.params import Params
from bonsai_jax.weights.memory import tensor_bytes, weight_bytes
from bonsai_jax.weights.specs import Description
from pallas_kernels import QTensor
from pallas_kernels.qtensor import leaves


def kernel_names(weights, rows: int) -> str:
    """The kernels that multiply these weights with this number of rows of activations: "int_decode",
    "int_decode+reference" where they differ, "int_decode:16" with 16 bits of activations and not 8."""
    names = {_kernel_name(w, rows) for w in leaves(weights)}
    return "+".join(sorted(names))


def step_names(params: Params, config: ModelConfig, rows: int = 1) -> str:
    """The same of a decode step for this number of rows: its schedule where that is not "launches"."""
    params = params.replace(draft_model=None)
    schedule = params.step.schedule(rows)
    if schedule != "launches" and params.adapter is not None:
        from bonsai_jax.network.fused import beside_adapter  # only GPUs need it

        schedule = beside_adapter(schedule, params, rows, config)
    if schedule == "launches":
        return kernel_names(params, rows)
    (bits,) = {w.products.activation_bits for w in leaves([layer.o for layer in params.layers["attention"]])}
    return schedule if bits == 8 else f"{schedule}:{bits}"


def _kernel_name(w: QTensor, rows: int) -> str:
    kernel, bits = w.products.kernel(rows), w.products.bits(rows)
    return kernel if bits == 8 or kernel in ("reference", "cublas") else f"{kernel}:{bits}"


def step_bytes(description: Description, run: RunConfig) -> int:
    """Weight bytes that one decode step of a sequence reads, of a model that is not loaded: all but the
    embedding's, where a matrix of its own gives the logits, the table of the layers' vectors, and those of
    experts that it does not use."""
    read = weight_bytes(dataclasses.replace(description, draft=None, draft_model=None), run)
    fields = {spec.field: sources for spec, sources in description.tensors.items() if spec.kind is None}
    looked_up = [fields["embed"][None]] if fields.get("head") else []
    looked_up += fields.get("vector_table", {}).values()
    read -= sum(tensor_bytes(t.format, t.shape, t.nbytes, run) for t in looked_up)
    if (experts := description.config.experts) is not None:
        stored = sum(
            tensor_bytes(t.format, t.shape, t.nbytes, run)
            for spec, t in description.sources
            if spec.kind == "experts" and len(spec.shape) == 3
        )
        read -= round((1 - experts.share_read(1)) * stored)
    return read


def decode_bytes(weights: int, config: ModelConfig, run: RunConfig, depths: Sequence[int]) -> int:
    """Bytes that one decode step must move for sequences at these depths: weights once, their keys and values
    once, up to a window where there is one, and recurrent states there and back."""
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    keys = sum(mixer.bytes_read(run, depth) for mixer in mixers for depth in depths)
    draft = sum(depths) * config.attention.bytes_read(run, 1) if config.draft else 0
    return weights + keys + draft
