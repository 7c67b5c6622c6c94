"""Load plans: what is planned for a model on a GPU, and that what is loaded is what was planned."""

import dataclasses

import jax
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.network import cache as kv
from bonsai_jax.network import params as network_params
from bonsai_jax.network.params import Params
from bonsai_jax.network.schedules import step_plan, step_problem
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.records import LoadPlan
from checkpoints import Checkpoint, open_checkpoint
from pallas_kernels import device, formats, selection
from pallas_kernels.precision import few_rows_bits
from pallas_kernels.qtensor import leaves
from pallas_kernels.step import decode_layers


def planned(source: str | Checkpoint, monkeypatch, platform="sm_90", **run) -> LoadPlan:
    """The load plan as on a GPU of this compute capability."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS[platform])
    checkpoint = open_checkpoint(source) if isinstance(source, str) else source
    return load_plans.plan(architectures.describe(checkpoint), bj.RunConfig(weights="packed", **run))


def loaded(plan: LoadPlan) -> Params:
    return jax.eval_shape(lambda: network_params.load(plan))


@pytest.mark.parametrize(
    ("source", "schedules"),
    [
        ("synth:bonsai-2-27b:ptq1_0", ["layer_products", "launches"]),  # two rows: 34 chunks to rotate
        ("synth:bonsai-27b:q4_k", ["layer_products", "layer_products"]),
        ("synth:bonsai-27b:q1_0", ["launches", "layer_products"]),
    ],
)
def test_layers_with_a_delta_net_are_two_launches_too(source, schedules, monkeypatch):
    plan = planned(source, monkeypatch)
    step, problem = step_plan(plan), step_problem(plan)
    assert [step.schedule(rows) for rows in (1, 2)] == schedules
    assert problem.widths == (6144,) * 64 and not problem.plain


def test_prompts_have_8_bits_where_they_are_rotated(monkeypatch):
    """Of ternary weights: those of Bonsai 2, but not those of a model that is not folded."""
    for source, kernel in (("bonsai-2-27b", "bit_prefill_sm90"), ("bonsai-8b", "int_prefill_sm90")):
        stacks = planned(f"synth:{source}:pq2_0", monkeypatch).stacks
        matrices = [piece.matrix for stack in stacks for part in stack.parts for piece in part]
        ternary = [m for m in matrices if m.problem.format == "pq2_0"]
        assert ternary and {m.products.kernel(512) for m in ternary} == {kernel}


FORMATS = ("q1_0", "q4_k", "q4_k_m", "q8_0", "f16")
LOADED = [(name, format) for name in ("tiny-qwen2", "tiny-llama") for format in FORMATS]
LOADED += [("bonsai-1.7b", format) for format in ("q1_0", "q4_k_m")]  # a whole step, and a mixture
SLOW = [("bonsai-1.7b", format) for format in ("q4_k", "q8_0", "f16")]


@pytest.mark.parametrize(
    ("name", "format"), [*LOADED, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]]
)
def test_what_is_loaded_is_what_was_planned(name, format, monkeypatch):
    plan = planned(f"synth:{name}:{format}", monkeypatch)
    params = loaded(plan)
    assert params.step == step_plan(plan)
    (attention,), (mlp,) = params.layers["attention"], params.layers["mlp"]
    stacks = [*attention.qkv, attention.o, mlp.gate, mlp.up, mlp.down]
    want = [piece.matrix for stack in plan.stacks if stack.kind for piece in stack.pieces]
    got = [w for stack in stacks for w in leaves(stack)]
    described = lambda ws: sorted((w.shape, str(w.products)) for w in ws)  # noqa: E731
    assert described(got) == described(want)
    assert [w.tiled for w in got] == [w.products.tiled for w in got]
    mixed = {m.problem.mixed for m in want}
    assert mixed == ({True, False} if format == "q4_k_m" else {False})
    if (name, format) == ("bonsai-1.7b", "q1_0"):
        assert params.step.schedule(1) == "one_launch"
        by_launches = step_plan(planned(f"synth:{name}:{format}", monkeypatch, schedule="launches"))
        assert by_launches.schedule(1) == "launches" and by_launches.unrolled


@pytest.mark.parametrize("name", ["bonsai-8b", "bonsai-4b", "bonsai-1.7b"])
def test_steps_of_many_rows_have_the_schedule_of_their_number(name, monkeypatch):
    def schedules(*rows: int, **run) -> list[str]:
        step = step_plan(planned(f"synth:{name}:q1_0", monkeypatch, **run))
        return [step.schedule(count) for count in rows]

    assert schedules(1, 24, 25, 256, 257) == ["one_launch"] * 2 + ["layer_gemms"] * 2 + ["launches"]
    room = decode_layers.Shapes.refuses
    monkeypatch.setattr(
        decode_layers.Shapes, "refuses", lambda self: "no room" if self.rows > 4 else room(self)
    )
    assert schedules(4, 5, 8, 9) == ["one_launch", "launches", "launches", "layer_gemms"]
    monkeypatch.setattr(decode_layers.Shapes, "refuses", room)
    assert schedules(1, 12, 13, activation_bits=16) == ["one_launch", "one_launch", "launches"]


@pytest.mark.parametrize("source", ["bonsai-8b:q4_k_m", "smollm2-135m:q4_1"])
def test_several_rows_of_2_to_8_bits_round_for_each_other(source, monkeypatch):
    def schedules(**run) -> list[str]:
        step = step_plan(planned(f"synth:{source}", monkeypatch, **run))
        return [step.schedule(rows) for rows in (4, 5, 8, 9, 257)]

    assert schedules() == ["one_launch", *["int_launches"] * 2, "layer_gemms", "launches"]
    assert schedules(activation_bits=16) == ["one_launch", *["launches"] * 4]
    named = schedules(schedule="int_launches")
    assert named == ["launches", *["int_launches"] * 2, *["launches"] * 2]


@pytest.mark.parametrize(
    ("source", "platform", "bits", "few", "many"),
    [
        ("synth:bonsai-8b:q1_0", "sm_90", 8, 16, 8),
        ("synth:bonsai-27b:q1_0", "sm_90", 8, 16, 8),
        ("synth:bonsai-8b:q1_0", "sm_80", 8, 16, 8),
        ("synth:bonsai-8b:q1_0", "sm_90", 16, 16, 16),
        ("synth:bonsai-8b:q4_k_m", "sm_90", 8, 8, 8),
    ],
)
def test_what_down_reads_has_16_bits_in_few_rows_of_1_bit_weights(
    source, platform, bits, few, many, monkeypatch
):
    assert few_rows_bits("cpu", "q1_0", 8) == 8
    plan = planned(source, monkeypatch, platform, activation_bits=bits)
    for stack in plan.stacks:
        for piece in stack.pieces if stack.kind else ():
            products = piece.matrix.products
            (field, *_) = piece.matrix.fields
            want = (few, many) if field == "down" else (bits, bits)
            assert (products.bits(1), products.bits(8), products.bits(9)) == (want[0], *want), field
    step = step_problem(plan)
    assert step.bits == bits
    for rows, want in ((8, few), (9, many)):
        assert dataclasses.replace(step, rows=rows).bits_of_down == want


def test_layer_gemms_may_be_named_though_it_is_for_batches(monkeypatch):
    step = step_plan(planned("synth:bonsai-1.7b:q1_0", monkeypatch, schedule="layer_gemms"))
    schedules = [step.schedule(rows) for rows in (1, 8, 9, 256, 257)]
    assert schedules == ["launches"] * 2 + ["layer_gemms"] * 2 + ["launches"]
    refused = planned("synth:bonsai-1.7b:q1_0", monkeypatch, schedule="layer_gemms", activation_bits=16)
    with pytest.raises(NotImplementedError, match="schedule='layer_gemms' cannot run"):
        step_plan(refused)


def test_stacks_of_several_formats_are_all_for_cublas(monkeypatch):
    """A traced layer would make formats the branches of an XLA conditional, for which a GPU waits."""
    layers = loaded(planned("synth:tiny-llama:q4_k_m", monkeypatch)).layers
    (attention,), (mlp,) = layers["attention"], layers["mlp"]
    for stack in (*attention.qkv, attention.o, mlp.gate, mlp.up, mlp.down):
        parts = leaves(stack)
        assert {w.products.kernel(512) for w in parts} == {
            "int_prefill_sm90" if len(parts) == 1 else "cublas"
        }
    assert len(leaves(mlp.down)) == 2 and len(leaves(mlp.gate)) == 1


@pytest.mark.parametrize("format", formats.names())
def test_a_model_is_planned_as_the_list_says(format, monkeypatch):
    plan = planned(f"synth:tiny-qwen3:{format}", monkeypatch)
    assert {matrix.products.tiled for matrix, _ in plan.each()} == {formats.family(format) is not None}


EVERY_DAY = ("f32", "q1_0", "q4_k", "q8_0", "tq1_0", "mxfp4")  # a plan is executed without knowing formats


@pytest.mark.parametrize(
    "format",
    [pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow) for name in formats.names()],
)
def test_a_model_is_loaded_for_what_the_list_says(format, monkeypatch):
    plan = planned(f"synth:tiny-qwen3:{format}", monkeypatch)
    params = loaded(plan)
    matrices = [
        params.embed,
        *params.layers["attention"][0].qkv[0].parts,
        *params.layers["mlp"][0].down.parts,
    ]
    assert {w.tiled for w in matrices} == {formats.family(format) is not None}
    assert kv.empty(plan.config, plan.run, 1, 64).states["attention"][0].impl == "decode"


def test_experts_are_one_feed_forward_where_gate_and_up_have_one_format(monkeypatch):
    """In all layers; else each product is for itself, and `inspect` says so."""
    checkpoint = open_checkpoint("synth:tiny-qwen3moe:q4_k")
    alike = planned(checkpoint, monkeypatch)
    apart = planned(with_format(checkpoint, "blk.1.ffn_up_exps.weight", "q6_k"), monkeypatch)
    for plan, more, many in ((alike, "grouped_decode", "grouped"), (apart, "int_experts", "int_experts")):
        matrices = [matrix for matrix, _ in plan.each() if matrix.experts]
        assert {plan.kernel(matrix, 16) for matrix in matrices} == {"int_experts"}
        assert {plan.kernel(matrix, rows) for matrix in matrices for rows in (17, 64)} == {more}
        assert {plan.kernel(matrix, 65) for matrix in matrices} == {many}
    verdicts = selection.explain(plan.experts_problem(matrices[0]), 512)
    assert verdicts[0].reason == "gate and up have different formats, or other kernels than down"


def test_gate_and_up_are_one_product_where_their_formats_agree(monkeypatch):
    checkpoint = open_checkpoint("synth:tiny-llama:q4_k")

    def matrices(plan: LoadPlan):
        counts = {
            stack.array: [part[0].matrix.problem.matrices for part in stack.parts]
            for stack in plan.stacks
            if stack.kind == "mlp"
        }
        return counts["gate"], counts["up"], counts["down"]

    assert matrices(planned(checkpoint, monkeypatch)) == ([2], [2], [1])
    # Of gate the layers in Q4_K have an up of the same; up's only stack has one beside a gate that differs.
    mixed = with_format(checkpoint, "blk.1.ffn_gate.weight", "q6_k")
    assert matrices(planned(mixed, monkeypatch)) == ([2, 1], [1], [1])


def with_format(checkpoint: Checkpoint, name: str, format: str) -> Checkpoint:
    """The same checkpoint with one tensor in another format."""
    other = dataclasses.replace(checkpoint.tensors[name], format=format)
    return dataclasses.replace(checkpoint, tensors=checkpoint.tensors | {name: other})
