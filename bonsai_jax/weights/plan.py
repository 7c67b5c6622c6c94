"""The load plan: for every matrix of a file its layout and its kernels, and how a decode step is launched.

    names, formats, shapes of tensors + ModelConfig + RunConfig (+ mesh)  ->  LoadPlan

Decided once, before a weight is read, by pallas_kernels/selection.py. `params.load` carries it out, `inspect`
prints it, and nothing decides later: what a jitted function runs is in the static fields of Params and
KVCache.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from bonsai_jax.config import Channels, DeltaConfig, Mixer, ModelConfig, RunConfig
from bonsai_jax.weights.placement import Placement, Share
from bonsai_jax.weights.specs import Source, Spec, match
from checkpoints import Checkpoint, Folding, RandomTensor, folding
from pallas_kernels import device, problems, selection
from pallas_kernels.qtensor import Products
from pallas_kernels.tiles import ROWS

# Fields of Layers that join those of Spec, rows below rows, because they have the same input.
JOINED = {
    "wqkv": ("wq", "wk", "wv"),
    "delta_in": ("delta_qkv", "delta_z"),
    "delta_gates": ("delta_alpha", "delta_beta"),
}
# Halves of SwiGLU, which are one product where their formats agree.
HALVES = {"w_gate": "w_up", "w_up": "w_gate", "expert_gate": "expert_up", "expert_up": "expert_gate"}


@dataclasses.dataclass(frozen=True)
class Member:
    """A matrix of the file on its way to a device.

    field   of Spec
    tensor  format, shape (N, K), and whether the device draws its blocks (checkpoints/synth.py) or is given
            them: on a CPU drawing.py draws, in programs of few sizes
    stored  format in which the device has it: the file's, or "f32" where it is dequantized at load
    share   what each device has of it, over a mesh that splits it; None: all
    folded  whether it is stored rotated (checkpoints/folding.py)
    regrouped  whether, for that, its inputs are brought from tiled order of v heads into grouped
    experts  of how many experts it is a matrix each; 0: it is one matrix
    """

    field: str
    format: str
    shape: tuple[int, int]
    drawn: bool
    stored: str
    share: Share | None
    folded: bool = False
    regrouped: bool = False
    experts: int = 0

    @property
    def own_shape(self) -> tuple[int, int]:
        """(N, K) on each device."""
        return self.share.shape(self.shape) if self.share and not self.experts else self.shape


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One QTensor of Params: a matrix, or several of the same input and format, rows below rows.

    fields    of Spec
    problem   what the choice of its kernels depends on
    products  the kernels chosen
    experts   of how many experts there is one in each layer; 0: it is one matrix
    """

    fields: tuple[str, ...]
    problem: problems.Matmul
    products: Products
    experts: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.problem.n, self.problem.k


@dataclasses.dataclass(frozen=True)
class Stack:
    """One LayerStack of Params: a weight of every layer that has it, or several of the same input (q, k and
    v).

    fields   of Spec
    members  of each layer, one for each field
    parts    for each combination of formats that layers have the matrices of a layer
    where    per layer (part, index within the part)
    """

    fields: tuple[str, ...]
    members: tuple[tuple[Member, ...], ...]
    parts: tuple[tuple[Matrix, ...], ...]
    where: tuple[tuple[int, int], ...]

    def layers(self, part: int) -> list[int]:
        return [layer for layer, (of, _) in enumerate(self.where) if of == part]

    def members_of(self, matrix: Matrix, layer: int) -> tuple[Member, ...]:
        return tuple(member for member in self.members[layer] if member.field in matrix.fields)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a decode step is launched.

    schedules  (most rows, schedule) in order, each a candidate of problems.Step; more rows have "launches"
    unrolled   whether layers are straight code, which a GPU captures as one graph, but a loop not; else
               they are scanned
    """

    schedules: tuple[tuple[int, str], ...] = ()
    unrolled: bool = False

    def schedule(self, rows: int) -> str:
        return next((schedule for most, schedule in self.schedules if rows <= most), "launches")


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What `params.load` does.

    tensors   of each spec, one per layer where it has layers; none for an absent optional one
    stacks    weights of layers
    matrices  weights that no layer has: embed, head
    step      how a decode step is launched
    problem   the decode step of one row
    folding   how matrices that are folded were rotated; None where none is
    naming    whose names and arrays the file has: "gguf" or "huggingface"
    v_heads   of a gated delta net whose v heads are tiled: (v heads of a k head, k heads)
    """

    tensors: dict[Spec, list[Source]]
    stacks: tuple[Stack, ...]
    matrices: tuple[tuple[Member, Matrix], ...]
    step: StepPlan
    problem: problems.Step
    folding: Folding | None = None
    v_heads: tuple[int, int] | None = None
    naming: str = "gguf"

    def kernel(self, matrix: Matrix, rows: int) -> str:
        """What multiplies so many rows with a matrix, or so many tokens with those of their experts."""
        chosen = selection.choose(self.experts_problem(matrix), rows) if matrix.experts else "tiles"
        return matrix.products.of(rows) if chosen == "tiles" else chosen

    def experts_problem(self, matrix: Matrix) -> problems.Experts:
        """Of a matrix that each expert has."""
        stored = {
            stack.fields[0]: [_as_stored(member) for of in stack.members for member in of]
            for stack in self.stacks
            if stack.members[0][0].experts
        }
        kernels = {of.products.of(1) for of, _ in self.each() if of.experts}
        alike = stored["expert_gate"] == stored["expert_up"]
        return problems.Experts(
            device.platform(),
            matrix.products.of(1),
            whole=alike and len(kernels) == 1,
            folded=any(folded for of in stored.values() for _, folded in of),
        )

    def each(self) -> Iterator[tuple[Matrix, int]]:
        """(matrix, number of them in all layers and experts) of every matrix."""
        for _, matrix in self.matrices:
            yield matrix, 1
        for stack in self.stacks:
            for part, matrices in enumerate(stack.parts):
                for matrix in matrices:
                    yield matrix, len(stack.layers(part)) * max(1, matrix.experts)


def plan(
    checkpoint: Checkpoint,
    specs: Sequence[Spec],
    config: ModelConfig,
    run: RunConfig,
    placement: Placement | None = None,
) -> LoadPlan:
    """The plan for a checkpoint on the default device, or over a mesh. No weight is read.

    specs  the architecture's table: each tensor of the file must have one, each of its entries a tensor
    run    resolved (model.resolve)
    Raises CheckpointError naming the tensor that is missing, extra or of the wrong shape, NotImplementedError
    for a format without a file in pallas_kernels/formats and for an implementation or a schedule that was
    named and cannot run, and ValueError for weights that the placement cannot split.
    """
    tensors, fold = match(checkpoint, specs, config), folding(checkpoint)
    members = {
        spec.field: [_member(spec.field, t, run, placement, fold) for t in of]
        for spec, of in tensors.items()
        if spec.is_matrix and of
    }
    if placement:
        placement.check(
            [
                (m.field, m.shape, m.stored, _is_tiled(m, run), m.regrouped)
                for of in members.values()
                for m in of
            ]
        )
    of_layers = {spec.field for spec in specs if "{}" in spec.gguf} & members.keys()
    groups = []
    for of in JOINED.values():
        present = tuple(field for field in of if field in of_layers)
        together = present and _may_join([members[field] for field in present], run)
        groups += [present] if together else [(field,) for field in present]
    groups += [(field,) for field in members if field in of_layers and joined_name(field) is None]
    stacks = tuple(_stack(fields, members, run) for fields in groups)
    matrices = tuple(
        (of[0], _matrix((of[0],), run)) for field, of in members.items() if field not in of_layers
    )
    problem = _step_problem(stacks, config, run, split=bool(placement and placement.axis))
    d = config.delta
    v_heads = (d.v_heads // d.k_heads, d.k_heads) if d and not d.grouped else None
    if placement and placement.axis and v_heads and v_heads[0] > 1:
        for member in members.get("delta_out", ()):
            if member.folded and not member.regrouped:
                raise NotImplementedError(
                    f"{checkpoint.source}: prism.hadamard.gdn_v_grouped is False: v heads that were folded "
                    "in tiled order are not split over devices; load it on one, or split rows only (data "
                    "parallel)"
                )
    step = _step_plan(problem, stacks, run)
    return LoadPlan(tensors, stacks, matrices, step, problem, fold, v_heads, checkpoint.naming)


def with_draft(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """The same with the draft layer (MTP) in use. Raises ValueError for a file that has none, and
    NotImplementedError for several, or one whose weights are folded."""
    marks = {"gguf": "nextn.eh_proj.weight", "huggingface": "fc.weight"}
    found = [start for start in config.aside if start + marks[checkpoint.naming] in checkpoint.tensors]
    if not found:
        raise ValueError(f"{checkpoint.source}: it has no draft layer (MTP); leave draft and 'mtp' out")
    if len(found) > 1:
        raise NotImplementedError(f"{checkpoint.source}: it has {len(found)} draft layers; supported: one")
    if (fold := folding(checkpoint)) and any(name.startswith(found[0]) for name in fold.weights):
        raise NotImplementedError(
            f"{checkpoint.source}: weights of its draft layer are Hadamard-folded, which is not supported; "
            "leave draft and 'mtp' out"
        )
    return dataclasses.replace(
        config, draft=found[0], aside=tuple(start for start in config.aside if start != found[0])
    )


def of_draft(
    checkpoint: Checkpoint,
    specs: Sequence[Spec],
    config: ModelConfig,
    run: RunConfig,
    placement: Placement | None = None,
) -> LoadPlan:
    """The plan for a draft layer, as if it were a model of one layer; arguments and errors as for `plan`."""
    assert config.draft is not None
    own = "blk.0." if checkpoint.naming == "gguf" else config.draft
    tensors = {
        name.replace(config.draft, own, 1): t
        for name, t in checkpoint.tensors.items()
        if name.startswith(config.draft)
    }
    alone = dataclasses.replace(checkpoint, tensors=tensors, metadata={})
    of_one = dataclasses.replace(
        config, num_layers=1, mixers=(), channels=(), delta=None, aside=(), draft=None
    )
    return plan(alone, specs, of_one, dataclasses.replace(run, schedule="launches"), placement)


def joined_name(field: str) -> str | None:
    """The field of Layers that a field of Spec is joined in; None: none."""
    return next((name for name, of in JOINED.items() if field in of), None)


def attention_problems(config: ModelConfig, run: RunConfig) -> tuple[problems.Attention, problems.Attention]:
    """What the choice of attention depends on: for one token a row, and for many. `run` must be resolved."""
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, run.page_size, str(run.cache_dtype))
    rest = {"window": config.window, "scale": config.attention_scale, "rotated": config.rotated}
    return (
        problems.Attention(device.platform(), "decode", *sizes, **rest),
        problems.Attention(device.platform(), "prefill", *sizes, **rest),
    )


def attention_kernels(config: ModelConfig, run: RunConfig) -> tuple[str, str]:
    """The kernels of attention, for one token a row and for many. Naming an implementation names the one of a
    decode step; only "reference" asks for it everywhere."""
    decode, prefill = attention_problems(config, run)
    of_many = "reference" if run.impl == "reference" else "auto"
    return selection.choose(decode, impl=run.impl), selection.choose(prefill, impl=of_many)


def delta_problems(sizes: DeltaConfig) -> tuple[problems.DeltaNet, problems.DeltaNet]:
    """As `attention_problems`, of a gated delta net."""
    of = (sizes.k_heads, sizes.v_heads, sizes.k_dim, sizes.v_dim, sizes.conv)
    platform = device.platform()
    return problems.DeltaNet(platform, "decode", *of), problems.DeltaNet(platform, "prefill", *of)


def delta_kernels(sizes: DeltaConfig, run: RunConfig) -> tuple[str, str]:
    """As `attention_kernels`, of a gated delta net."""
    decode, prefill = delta_problems(sizes)
    impl = "reference" if run.impl == "reference" else "auto"
    return selection.choose(decode, impl=impl), selection.choose(prefill, impl=impl)


def _member(
    field: str,
    t: Source,
    run: RunConfig,
    placement: Placement | None,
    fold: Folding | None = None,
) -> Member:
    *experts, n, k = t.shape
    stored = "f32" if run.weights == "decoded" else t.format
    folded = fold is not None and fold.folds(t.name)
    regrouped = fold is not None and folded and fold.v_grouped and field == "delta_out"
    drawn = isinstance(t, RandomTensor) and device.platform() != "cpu"
    count = math.prod(experts) if experts else 0
    whole = Member(field, t.format, (n, k), drawn, stored, None, folded, regrouped, count)
    if placement is None:
        return whole
    share = placement.share(field, (n, k), _is_tiled(whole, run), regrouped)
    return dataclasses.replace(whole, share=share)


def _is_tiled(member: Member, run: RunConfig) -> bool:
    problem = problems.Matmul(device.platform(), member.stored, *member.shape, bits=run.activation_bits)
    return selection.products(problem, run.impl).tiled


def _may_join(members: Sequence[Sequence[Member]], run: RunConfig) -> bool:
    """Whether matrices can lie rows below rows: those of kernels must fill whole tiles, and folded ones have
    another input."""
    if any(len({m.folded for m in of}) > 1 for of in zip(*members, strict=True)):
        return False
    return not any(m.own_shape[0] % ROWS and _is_tiled(m, run) for of in members for m in of)


def _stack(fields: tuple[str, ...], members: Mapping[str, Sequence[Member]], run: RunConfig) -> Stack:
    of_layer = tuple(zip(*(members[field] for field in fields), strict=True))
    other_half = members.get(HALVES.get(fields[0], ""), [])
    kinds: dict[tuple, list[int]] = {}  # formats as stored -> layers
    for layer, of in enumerate(of_layer):
        kinds.setdefault(tuple(map(_as_stored, of)), []).append(layer)
    joined = [_runs(of_layer[layers[0]]) for layers in kinds.values()]
    mixed = sum(map(len, joined)) > 1
    halves = [
        bool(other_half) and all((_as_stored(other_half[layer]),) == kind for layer in layers)
        for kind, layers in kinds.items()
    ]
    parts = tuple(
        tuple(_matrix(same, run, mixed, matrices=1 + half) for same in of)
        for of, half in zip(joined, halves, strict=True)
    )
    where = {layer: (part, at) for part, of in enumerate(kinds.values()) for at, layer in enumerate(of)}
    return Stack(fields, of_layer, parts, tuple(where[layer] for layer in range(len(of_layer))))


def _runs(members: Sequence[Member]) -> list[tuple[Member, ...]]:
    """Neighbours that are stored in the same format."""
    return [tuple(of) for _, of in itertools.groupby(members, key=_as_stored)]


def _as_stored(member: Member) -> tuple[str, bool]:
    return member.stored, member.folded


def _matrix(members: tuple[Member, ...], run: RunConfig, mixed: bool = False, matrices: int = 1) -> Matrix:
    problem = problems.Matmul(
        device.platform(),
        members[0].stored,
        sum(member.own_shape[0] for member in members),
        members[0].own_shape[1],
        matrices=matrices,
        bits=run.activation_bits,
        mixed=mixed,
    )
    fields = tuple(member.field for member in members)
    return Matrix(fields, problem, selection.products(problem, run.impl), members[0].experts)


def _step_problem(stacks: Sequence[Stack], config: ModelConfig, run: RunConfig, split: bool) -> problems.Step:
    whole = {stack.fields: stack for stack in stacks}  # not where what could be joined is apart
    products: dict[Mixer | Channels, list[tuple[str, ...]]] = {
        "attention": [JOINED["wqkv"], ("wo",)],
        "delta": [JOINED["delta_in"], ("delta_out",)],
        "mlp": [("w_gate",), ("w_up",), ("w_down",)],
        "experts": [("expert_gate",), ("expert_up",), ("expert_down",)],
    }
    used = [fields for kind, of in products.items() if config.layers_of(kind) for fields in of]
    joined = len({channels for _, channels in config.kinds}) == 1 and all(fields in whole for fields in used)
    members = [m for fields in used if joined for of in whole[fields].members for m in of]
    matrices = [m for fields in used if joined for part in whole[fields].parts for m in part]
    folded = any(member.folded for member in members)
    joined = joined and all(matrix.products.tiled for matrix in matrices)
    joined = joined and all(member.folded == folded for member in members)
    if router := whole.get(("router",)):
        of_router = {matrix.problem.format for part in router.parts for matrix in part}
        joined = joined and of_router in ({"f32"}, {"f16"}, {"bf16"})

    def of_layer(layer: int):
        for kind, index in zip(config.kinds[layer], config.places(layer), strict=True):
            for stack in (whole[fields] for fields in products[kind]):
                part = stack.parts[stack.where[index][0]]
                yield tuple((matrix.problem.format, matrix.problem.n) for matrix in part)

    layers = tuple(tuple(of_layer(layer)) for layer in range(config.num_layers if joined else 0))
    delta = config.delta
    widths = tuple(
        delta.v_width if mixer == "delta" and delta else config.q_width for mixer, _ in config.kinds
    )
    decode, _ = attention_problems(config, run)
    return problems.Step(
        device.platform(),
        1,
        config.hidden,
        config.ffn if config.experts is None else config.experts.ffn,
        layers if joined else None,
        decode,
        experts=(config.experts.count, config.experts.used) if config.experts else None,
        bits=run.activation_bits,
        activation=config.activation,
        split=split,
        widths=widths,
        plain=delta is None and not config.attention_gate,
        folded=folded,
    )


def _step_plan(problem: problems.Step, stacks: Sequence[Stack], run: RunConfig) -> StepPlan:
    tiled = any(matrix.products.tiled for stack in stacks for part in stack.parts for matrix in part)
    return StepPlan(selection.schedules(problem, run.schedule), unrolled=tiled)
