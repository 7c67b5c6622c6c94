"""Importance matrices of a model, computed on texts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.making.importance import Importance, means
from bonsai_jax.model import Model
from bonsai_jax.network import architectures, inputs
from bonsai_jax.network.taps import Taps
from bonsai_jax.progress import Progress
from bonsai_jax.research.harvest import harvest
from pallas_kernels.qtensor import QTensor, leaves


def importance(
    model: Model,
    texts: Iterable[str | Sequence[int]],
    *,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Importance:
    """Importance matrices: for each column of the layers' matrices, the mean square of the activations that
    it is multiplied with.

    importance[k] = sum over tokens of x[k]^2 / number of tokens,  y = x @ W.T

        matrices = bj.importance(model, texts)
        bj.quantize_file("model-f16.gguf", "model-q4_k_m.gguf", "q4_k_m", importance=matrices)
        matrices.write("imatrix.gguf")                # in the layout of llama.cpp's llama-imatrix

    Each expert has its own, of the tokens that were sent to it. Embeddings and the output matrix have none,
    and neither have latent attention's matrices of one head each. Take the model that is to be quantized, in
    F16 or Q8_0, and texts like those that it is for, of 50,000 tokens or more.

    texts       texts or token ids, as for `harvest`, each within the context
    batch_size, progress  as for `harvest`
    Raises ValueError if there are no texts, and NotImplementedError for a model on several devices and for
    weights that are stored rotated. Other errors are those of `harvest`.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; give what bj.load returns")
    if model.mesh is not None:
        raise NotImplementedError("importance: the model is on several devices; load it without a mesh")
    if any(isinstance(w, QTensor) and w.rotation is not None for w in leaves(model.params.layers)):
        raise NotImplementedError(
            f"importance: {model.source} stores rotated weights (Hadamard folding); take the model before it "
            "was folded"
        )
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"texts are a {type(texts).__name__}; give an iterable of texts")
    texts = list(texts)
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((), np.float64))
    longest = 0
    taps = Taps(inputs=True)
    for batch in harvest(model, texts, taps, batch_size=batch_size, progress=progress):
        for name, values in batch.activations.items():
            sums[name] = sums[name] + np.asarray(values, np.float64)
        longest = max(longest, int(batch.mask.sum(axis=1).max()))
    if not sums:
        raise ValueError("importance: there are no texts")
    columns, counts = {}, {}
    for name, site, index in _matrices(model.config):
        if site in sums:
            count = sums[site + inputs.COUNTS][index]
            columns[name] = means(sums[site][index], count[:, None])
            counts[name] = count.astype(np.float32)
    return Importance(model.source, columns, counts, (), len(texts), longest)


def _matrices(config: ModelConfig) -> Iterator[tuple[str, str, int]]:
    """(name in a GGUF file, site of its inputs, index in the site) of the layers' matrices. What may lie with
    others in one tensor has that one's name too."""
    for spec in architectures.get(config.architecture).TENSORS:
        if spec.kind is None or not spec.is_matrix:
            continue
        names = [spec.gguf, *([spec.fused.gguf] if spec.fused is not None and spec.fused.gguf else [])]
        layers = set(spec.layers(config))
        for number, group in enumerate(config.groups(spec.kind)):
            for index, layer in enumerate(group.layers):
                if layer in layers:
                    for name in names:
                        yield name.format(layer), inputs.site(spec.kind, number, spec.array), index
