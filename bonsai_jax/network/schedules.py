"""How the kernels of a decode step are launched, decided from the load plan (fused.py carries it out).

    one_launch       all layers in one launch
    layer_products   two launches a layer: what mixes tokens, and all products up to the next layer's
    int_launches     five a layer, for several sequences, each product rounding its outputs for the next one
    layer_gemms      about eight a layer, for many sequences, each consumer adding its producer's parts
    launches         block by block (decoder.py)

A fused launch runs models whose layers are one group of what mixes channels; what else it needs is in the
refusals of pallas_kernels.
"""

import dataclasses
from typing import Any

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import kinds
from bonsai_jax.weights.records import LoadPlan
from pallas_kernels import device, problems, selection


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a decode step is launched.

    schedules  (most rows, schedule) in order, each a candidate of problems.Step; more rows have "launches"
    plain      problems.Step.plain
    unrolled   whether layers are straight code, which a GPU captures as one graph, but a loop not; else
               they are scanned
    """

    schedules: tuple[tuple[int, str], ...] = ()
    unrolled: bool = False
    plain: bool = True

    def schedule(self, rows: int) -> str:
        return next((schedule for most, schedule in self.schedules if rows <= most), "launches")


def step_plan(plan: LoadPlan) -> StepPlan:
    """The schedule for every number of rows. Raises NotImplementedError where the one that was asked for
    cannot run."""
    problem, run = step_problem(plan), plan.run
    tiled = any(p.matrix.products.tiled for stack in plan.stacks if stack.kind for p in stack.pieces)
    return StepPlan(selection.schedules(problem, run.schedule), unrolled=tiled, plain=problem.plain)


def step_problem(plan: LoadPlan) -> problems.Step:
    """The decode step of one row, as the choice of a schedule sees it."""
    config, run = plan.config, plan.run
    stacks = {(stack.kind, stack.group, stack.array): stack for stack in plan.stacks if stack.whole}
    used = [
        (kind, group, array)
        for kind in config.kinds
        for group in range(len(config.groups(kind)))
        for array in kinds.get(kind).PRODUCTS or ()
    ]
    channels = {layer.channels for layer in config.layers}
    joined = len(channels) == 1 and all(kinds.get(kind).PRODUCTS is not None for kind in config.kinds)
    joined = joined and all(key in stacks for key in used)
    members = [member for key in used if joined for member in stacks[key].members]
    matrices = [piece.matrix for key in used if joined for piece in stacks[key].pieces]
    folded = any(member.folded for member in members)
    joined = joined and all(matrix.products.tiled for matrix in matrices)
    joined = joined and all(member.folded == folded for member in members)
    if router := stacks.get(("experts", 0, "router")):
        formats = {piece.matrix.problem.format for piece in router.pieces}
        joined = joined and formats in ({"f32"}, {"f16"}, {"bf16"})

    def layer_products(number: int):
        for half in config.layers[number].halves:
            group, index = config.position(number, half)
            for array in kinds.get(half.kind).PRODUCTS or ():
                stack = stacks[half.kind, group, array]
                part = stack.parts[stack.where[index][0]]
                yield tuple((piece.matrix.problem.format, piece.matrix.problem.n) for piece in part)

    layers = tuple(tuple(layer_products(n)) for n in range(config.num_layers if joined else 0))
    decode, _ = config.attention.problems(run)
    experts, only, mixed = config.experts, config.layers[0].channels, _mixed(config)
    return problems.Step(
        device.platform(),
        1,
        config.hidden,
        only.ffn if only else 0,
        layers if joined else None,
        decode,
        experts=(experts.count, experts.used) if experts else None,
        bits=run.activation_bits,
        down_bits=max((m.problem.few_rows_bits or 0 for m in matrices), default=0) or None,
        split=plan.placement.axis is not None,
        widths=tuple(mixer.output_width for layer in config.layers for mixer in layer.mixers),
        plain=len({(layer.mixer, layer.output) for layer in config.layers}) == 1
        and config.layers[0].output is None
        and config.attention.plain
        and not any((vector.kind, vector.array) in mixed for vector in plan.vectors),
        folded=folded,
        post_norms=bool(_normed(plan, "post_norm")),
        unknown=_unknown(plan),
    )


# Settings of a model that its fused launches know of, or that do not concern its layers.
MODEL = {
    "architecture", "hidden", "vocab_size", "context_length", "rms_norm_eps", "layers", "embedding_scale",
    "logit_scale", "logit_softcap", "skipped", "draft", "draft_model",
}  # fmt: skip
LAYER = {"mixer", "channels", "output"}


def _unknown(plan: LoadPlan) -> tuple[str, ...]:
    """Settings and arrays of a model that no fused launch was written for. Those of layers: kinds' FUSED."""
    config, fused = plan.config, [k for k in plan.config.kinds if kinds.get(k).PRODUCTS is not None]
    known = {kind: {*kinds.get(kind).PRODUCTS, *kinds.get(kind).FUSED} for kind in fused}
    for kind, name in _mixed(config):
        known[kind].add(name)
    names = _set_beside(config, MODEL)
    for layer in dict.fromkeys(config.layers):
        names += _set_beside(layer, LAYER)
        names += [
            name
            for half in layer.halves
            if half.kind in known
            for name in _set_beside(half, known[half.kind])
        ]
    arrays = [(one.kind, one.group, one.array) for one in (*plan.stacks, *plan.vectors)]
    names += [array for kind, _, array in arrays if kind in known and array not in known[kind]]
    halves = [kind for kind in fused if kinds.get(kind).PRODUCTS]
    groups = {(kind, group) for kind in halves for group in range(len(config.groups(kind)))}
    before, after = _normed(plan, "norm") & groups, _normed(plan, "post_norm") & groups
    names += ["no norm"] * (before | after != groups)
    names += ["norms after some halves alone"] * (bool(after) and after != groups)
    names += ["scaled outputs of layers"] * (not after and any(layer.output for layer in config.layers))
    return tuple(dict.fromkeys(names))


def _mixed(config: ModelConfig) -> set[tuple[str, str]]:
    """(kind, setting or array) that what mixes tokens takes notice of between its products (kinds' MIXED)."""
    mixers = {half.kind for layer in config.layers for half in layer.mixers}
    return {(kind, name) for kind in mixers if kinds.get(kind).PRODUCTS for name in kinds.get(kind).MIXED}


def _normed(plan: LoadPlan, array: str) -> set[tuple[str | None, int]]:
    """The kinds and groups that have a norm of this name."""
    return {(vector.kind, vector.group) for vector in plan.vectors if vector.array == array}


def _set_beside(settings: Any, known: set[str]) -> list[str]:
    """Names of the other fields that have another value than their default."""
    fields = [field for field in dataclasses.fields(settings) if field.name not in known]
    return [field.name for field in fields if getattr(settings, field.name) != field.default]
