"""Load plans: what is planned for a model on a GPU, and that what is loaded is what was planned."""

import dataclasses

import jax
import pytest

import bonsai_jax as bj
from bonsai_jax import model
from bonsai_jax.network import architectures
from bonsai_jax.weights.params import Params
from checkpoints import open_checkpoint
from pallas_kernels import device, formats, selection
from pallas_kernels.qtensor import leaves
from pallas_kernels.step import decode_layers


def planned(source: str, monkeypatch, platform="sm_90", **run):
    """(checkpoint, config, run, plan) as on a GPU of this compute capability."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS[platform])
    checkpoint = open_checkpoint(source)
    config = architectures.config_of(checkpoint)
    resolved = model.resolve(bj.RunConfig(weights="packed", **run), checkpoint, config)
    return checkpoint, config, resolved, model.load_plan(checkpoint, config, resolved)


def loaded(checkpoint, config, run) -> Params:
    return jax.eval_shape(lambda: model.load_params(checkpoint, config, run))


@pytest.mark.parametrize(
    ("source", "schedules"),
    [
        ("synth:bonsai-2-27b:ptq1_0", ["layer_products", "launches"]),  # two rows: 34 chunks to rotate
        ("synth:bonsai-27b:q4_k", ["layer_products", "layer_products"]),
        ("synth:bonsai-27b:q1_0", ["launches", "launches"]),
    ],
)
def test_layers_with_a_delta_net_are_two_launches_too(source, schedules, monkeypatch):
    *_, plan = planned(source, monkeypatch)
    assert [plan.step.schedule(rows) for rows in (1, 2)] == schedules
    assert plan.problem.widths == (6144,) * 64 and not plan.problem.plain


FORMATS = ("q1_0", "q4_k", "q4_k_m", "q8_0", "f16")
LOADED = [(name, format) for name in ("tiny-qwen2", "tiny-llama") for format in FORMATS]
LOADED += [("bonsai-1.7b", format) for format in ("q1_0", "q4_k_m")]  # a whole step, and a mixture
SLOW = [("bonsai-1.7b", format) for format in ("q4_k", "q8_0", "f16")]


@pytest.mark.parametrize(
    ("name", "format"), [*LOADED, *[pytest.param(*of, marks=pytest.mark.slow) for of in SLOW]]
)
def test_what_is_loaded_is_what_was_planned(name, format, monkeypatch):
    checkpoint, config, run, plan = planned(f"synth:{name}:{format}", monkeypatch)
    params = loaded(checkpoint, config, run)
    assert params.step == plan.step
    stacks = [*params.layers.wqkv, *(getattr(params.layers, f) for f in ("wo", "w_gate", "w_up", "w_down"))]
    want = [m for stack in plan.stacks for part in stack.parts for m in part]
    got = [w for stack in stacks for w in leaves(stack)]
    described = lambda ws: sorted((w.shape, str(w.products)) for w in ws)  # noqa: E731
    assert described(got) == described(want)
    assert [w.tiled for w in got] == [w.products.tiled for w in got]
    mixed = {m.problem.mixed for m in want}
    assert mixed == ({True, False} if format == "q4_k_m" else {False})
    if (name, format) == ("bonsai-1.7b", "q1_0"):
        assert plan.step.schedule(1) == "one_launch"
        *_, by_launches = planned(f"synth:{name}:{format}", monkeypatch, schedule="launches")
        assert by_launches.step.schedule(1) == "launches" and by_launches.step.unrolled


@pytest.mark.parametrize("name", ["bonsai-8b", "bonsai-4b", "bonsai-1.7b"])
def test_steps_of_many_rows_have_the_schedule_of_their_number(name, monkeypatch):
    *_, plan = planned(f"synth:{name}:q1_0", monkeypatch)
    of_rows = [plan.step.schedule(rows) for rows in (1, 24, 25, 256, 257)]
    assert of_rows == ["one_launch"] * 2 + ["layer_gemms"] * 2 + ["launches"]
    room = decode_layers.Shapes.refuses
    monkeypatch.setattr(
        decode_layers.Shapes, "refuses", lambda self: "no room" if self.rows > 4 else room(self)
    )
    *_, plan = planned(f"synth:{name}:q1_0", monkeypatch)
    of_rows = [plan.step.schedule(rows) for rows in (4, 5, 8, 9)]
    assert of_rows == ["one_launch", "launches", "launches", "layer_gemms"]
    monkeypatch.setattr(decode_layers.Shapes, "refuses", room)
    *_, plan = planned(f"synth:{name}:q1_0", monkeypatch, activation_bits=16)
    assert [plan.step.schedule(rows) for rows in (1, 2)] == ["one_launch", "launches"]


def test_stacks_of_several_formats_are_all_for_cublas(monkeypatch):
    """A traced layer would make formats the branches of an XLA conditional, for which a GPU waits."""
    *args, _ = planned("synth:tiny-llama:q4_k_m", monkeypatch)
    layers = loaded(*args).layers
    for stack in (*layers.wqkv, layers.wo, layers.w_gate, layers.w_up, layers.w_down):
        held = leaves(stack)
        assert {w.products.of(512) for w in held} == {"int_prefill_sm90" if len(held) == 1 else "cublas"}
    assert len(leaves(layers.w_down)) == 2 and len(leaves(layers.w_gate)) == 1


@pytest.mark.parametrize("format", formats.names())
def test_a_model_is_planned_as_the_list_says(format, monkeypatch):
    *_, plan = planned(f"synth:tiny-qwen3:{format}", monkeypatch)
    matrices = [matrix for _, matrix in plan.matrices]
    matrices += [matrix for stack in plan.stacks for part in stack.parts for matrix in part]
    assert {matrix.products.tiled for matrix in matrices} == {formats.family(format) is not None}


EVERY_DAY = ("f32", "q1_0", "q4_k", "q8_0", "tq1_0", "mxfp4")  # a plan is executed without knowing formats


@pytest.mark.parametrize(
    "format",
    [pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow) for name in formats.names()],
)
def test_a_model_is_loaded_for_what_the_list_says(format, monkeypatch):
    *args, _ = planned(f"synth:tiny-qwen3:{format}", monkeypatch)
    params = loaded(*args)
    matrices = [params.embed, *params.layers.wqkv[0].parts, *params.layers.w_down.parts]
    assert {w.tiled for w in matrices} == {formats.family(format) is not None}
    assert bj.cache.empty(args[1], args[2], 1, 64).impl == "decode"


def test_experts_are_one_feed_forward_where_gate_and_up_have_one_format(monkeypatch):
    """In all layers; else each product is for itself, and `inspect` says so."""
    checkpoint, config, run, plan = planned("synth:tiny-qwen3moe:q4_k", monkeypatch)
    name = "blk.1.ffn_up_exps.weight"
    other = dataclasses.replace(checkpoint.tensors[name], format="q6_k")
    mixed = dataclasses.replace(checkpoint, tensors=checkpoint.tensors | {name: other})
    alike, apart = plan, model.load_plan(mixed, config, run)
    for plan, of_many in ((alike, "grouped"), (apart, "int_experts")):
        matrices = [matrix for matrix, _ in plan.each() if matrix.experts]
        assert {plan.kernel(matrix, 16) for matrix in matrices} == {"int_experts"}
        assert {plan.kernel(matrix, 17) for matrix in matrices} == {of_many}
    verdicts = selection.explain(plan.experts_problem(matrices[0]), 512)
    assert verdicts[0].reason == "gate and up have different formats, or other kernels than down"


def test_gate_and_up_are_one_product_where_their_formats_agree(monkeypatch):
    checkpoint, config, run, plan = planned("synth:tiny-llama:q4_k", monkeypatch)
    name = "blk.1.ffn_gate.weight"
    other = dataclasses.replace(checkpoint.tensors[name], format="q6_k")
    mixed = dataclasses.replace(checkpoint, tensors=checkpoint.tensors | {name: other})

    def matrices(plan):
        of = {stack.fields[0]: [part[0].problem.matrices for part in stack.parts] for stack in plan.stacks}
        return of["w_gate"], of["w_up"], of["w_down"]

    assert matrices(plan) == ([2], [2], [1])
    # Of gate the layers in Q4_K have an up of the same; up's only stack has one beside a gate that differs.
    assert matrices(model.load_plan(mixed, config, run)) == ([2, 1], [1], [1])
