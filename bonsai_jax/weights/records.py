"""What a load plan is made of: a record for each array of Params, with all that reading it takes. `plan.py`
makes them, `read.py` carries them out.

    LoadPlan
      Stack       a LayerStack: a weight of every layer in a group, or several with the same input
        Piece     a QTensor in it: the layers whose weights have the same formats
          Matrix  its fields, problem and kernels
          Part    a matrix of the file in it, as a Member and its tensor
      Vector      a small array: a norm, a bias
"""

import dataclasses
from collections.abc import Iterator

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.weights.placement import ONE_DEVICE, Placement, Share
from bonsai_jax.weights.specs import Description, Source, Spec
from pallas_kernels import Rotation, device, problems, selection
from pallas_kernels.qtensor import Products


@dataclasses.dataclass(frozen=True)
class Member:
    """How a matrix of the file becomes rows of one on a device: a static value, the same for layers that are
    made alike.

    field   of Spec
    format  the file's
    shape   (N, K)
    stored  format in which the device has it: the file's, or "f32" where it is dequantized at load
    tiled   whether kernels would read it in tiles, were it alone and whole
    drawn   whether the device draws its blocks (checkpoints/synth.py) or is given them: on a CPU drawing.py
            draws, in programs of few sizes
    share   what each device has of it, over a mesh that splits it; None: all
    folded  whether it is stored rotated (checkpoints/folding.py)
    heads   (repeats, k heads) of v heads that are brought for that from tiled order into grouped; None: they
            stay
    experts  for how many experts there is such a matrix; 0: there is one
    """

    field: str
    format: str
    shape: tuple[int, int]
    stored: str
    tiled: bool
    drawn: bool
    share: Share | None = None
    folded: bool = False
    heads: tuple[int, int] | None = None
    experts: int = 0

    @property
    def own_shape(self) -> tuple[int, int]:
        """(N, K) on each device."""
        return self.share.shape(self.shape) if self.share and not self.experts else self.shape

    @property
    def as_stored(self) -> tuple[str, bool]:
        """What members of one matrix have in common."""
        return self.stored, self.folded

    @property
    def given_whole(self) -> bool:
        """Whether each device is given, or draws, the whole matrix, and cuts out its own share."""
        return self.drawn or self.share is None or not self.share.whole_blocks


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One QTensor of Params: a matrix, or several with the same input and format, rows below rows.

    fields    of Spec
    problem   what the choice of its kernels depends on
    products  the kernels chosen
    experts   for how many experts of each layer there is one; 0: it is one matrix
    """

    fields: tuple[str, ...]
    problem: problems.Matmul
    products: Products
    experts: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.problem.n, self.problem.k


Part = tuple[Member, Source]  # a matrix of the file, and how it becomes rows of one on a device


@dataclasses.dataclass(frozen=True)
class Piece:
    """A matrix, or a stack of one of each of several layers, and all that reading it takes.

    matrix   what it becomes
    layers   of each layer the matrices of the file that lie below each other in it
    copied   whether the blocks of the file are copied as they are, into memory that XLA shares with numpy
    rotation of its inputs, numpy arrays; None: it is not folded
    """

    matrix: Matrix
    layers: tuple[tuple[Part, ...], ...]
    copied: bool
    rotation: Rotation | None

    @property
    def tensors(self) -> list[Source]:
        return [t for layer in self.layers for _, t in layer]


@dataclasses.dataclass(frozen=True)
class Stack:
    """One LayerStack of Params: a weight of every layer in a group, or several with the same input (q, k and
    v). Or one QTensor, a matrix that belongs to no layer: embed, head.

    kind, group  whose weights it is among (ModelConfig.groups); None: it belongs to no layer
    array    name of the array
    fields   of Spec
    layers   of each layer its matrices of the file, one for each field
    parts    for each combination of formats that layers have the pieces of a layer, stacked over these layers
    where    per layer (part, index within the part)
    joined   whether the array holds several stacks, because its members were not joined or not all of them
    whole    whether it has all matrices of the array that the file has
    """

    kind: str | None
    group: int
    array: str
    fields: tuple[str, ...]
    layers: tuple[tuple[Part, ...], ...]
    parts: tuple[tuple[Piece, ...], ...]
    where: tuple[tuple[int, int], ...]
    joined: bool
    whole: bool

    @property
    def pieces(self) -> list[Piece]:
        """Of all parts."""
        return [piece for part in self.parts for piece in part]

    @property
    def tensors(self) -> list[Source]:
        """Of all layers."""
        return [t for layer in self.layers for _, t in layer]

    @property
    def members(self) -> list[Member]:
        """Of all layers."""
        return [member for layer in self.layers for member, _ in layer]


@dataclasses.dataclass(frozen=True)
class Vector:
    """One float32 array of Params: a norm, a bias or the like of every layer in a group, or of the model's
    own.

    kind, group  whose weights it is among; None: it belongs to no layer
    array     name of the array
    tensors   of each spec that lies in it, side by side, its tensors by layer
    shares    of each spec what a device has of it
    axes      logical axes of the array
    """

    kind: str | None
    group: int
    array: str
    tensors: tuple[tuple[Spec, tuple[Source, ...]], ...]
    shares: tuple[Share | None, ...]
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What `read` does: a record for each array of Params, which has all that reading it takes.

    description  the file
    run       resolved: every default filled in for this model and device
    stacks    matrices
    vectors   small arrays
    placement how weights lie over devices
    draft     the plan of the draft layer, where it is loaded
    draft_model  the plan of the draft model, where there is one
    """

    description: Description
    run: RunConfig
    stacks: tuple[Stack, ...]
    vectors: tuple[Vector, ...]
    placement: Placement = ONE_DEVICE
    draft: "LoadPlan | None" = None
    draft_model: "LoadPlan | None" = None

    @property
    def config(self) -> ModelConfig:
        return self.description.config

    @property
    def models(self) -> "tuple[LoadPlan, ...]":
        """That of the model and, where they are loaded, those of its draft layer and its draft model."""
        return (self, *(one for one in (self.draft, self.draft_model) if one is not None))

    def kernel(self, matrix: Matrix, rows: int) -> str:
        """What multiplies so many rows with a matrix, or so many tokens with those of their experts."""
        chosen = selection.choose(self.experts_problem(matrix), rows) if matrix.experts else "tiles"
        return matrix.products.kernel(rows) if chosen == "tiles" else chosen

    def experts_problem(self, matrix: Matrix) -> problems.Experts:
        """The problem of a matrix that each expert has, or each head."""
        stacks = {stack.array: stack for stack in self.stacks if stack.members[0].experts}
        feed_forward = [stacks[name] for name in ("gate", "up", "down") if name in stacks]
        whole = "gate" in stacks and any(matrix == p.matrix for stack in feed_forward for p in stack.pieces)
        if whole:
            gate, up = ([member.as_stored for member in stacks[name].members] for name in ("gate", "up"))
            kernels = {p.matrix.products.kernel(1) for stack in feed_forward for p in stack.pieces}
            whole = gate == up and len(kernels) == 1
        folded = any(member.folded for stack in stacks.values() for member in stack.members)
        columns = max(p.matrix.problem.k for stack in feed_forward for p in stack.pieces) if whole else 0
        how = {"whole": whole, "folded": folded, "columns": columns}
        return problems.Experts(device.platform(), matrix.products.kernel(1), **how)

    def each(self) -> Iterator[tuple[Matrix, int]]:
        """(matrix, number of them in all layers and experts) of every matrix."""
        for stack in self.stacks:
            for piece in stack.pieces:
                yield piece.matrix, len(piece.layers) * max(1, piece.matrix.experts)
