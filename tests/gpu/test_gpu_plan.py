"""What `inspect` says runs, held against what a profiler saw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]

# Kernels that prepare a product's operands; a plan names the products.
PREPARE = {"activations_int8", "activations_float16", "quantize_rows", "int_dequantize"}
SCRIPT = """
import glob, json, sys
import jax, jax.numpy as jnp
import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.weights import plan as load_plans
from checkpoints import open_checkpoint
from pallas_kernels import problems, selection

source, rows, tokens, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = bj.load(source, bj.RunConfig(schedule="launches", context=1024))
plan = load_plans.plan(architectures.describe(open_checkpoint(source)), model.run)
matrices = [piece.matrix for stack in plan.stacks if stack.kind for piece in stack.pieces]
dense = {m.products.kernel(rows * tokens) for m in matrices if not m.experts}
experts = {plan.kernel(m, rows * tokens) for m in matrices if m.experts}
heads = {s.array: s.pieces[0].matrix.products.kernel(rows) for s in plan.stacks if s.kind is None}
head = {heads.get("head", heads["embed"])}
state = bj.new_state(model, rows, 1024, bj.SamplingParams(temperature=0.0), 64)
(keys,) = state.cache.states["attention"]
attends = keys.impl if tokens == 1 else keys.prefill_impl
prompt, lengths = jnp.ones((rows, max(tokens, 8)), jnp.int32), jnp.full(rows, max(tokens, 8), jnp.int32)
prefill = jax.jit(bj.prefill, static_argnames="config")
step = jax.jit(bj.step, static_argnames="config")
run = lambda state: prefill(model.params, state, prompt, lengths, model.config)
if tokens == 1:
    state = jax.block_until_ready(run(state).state)
    run = lambda state: step(model.params, state, model.config)
jax.block_until_ready(run(state))
with jax.profiler.trace(folder):
    jax.block_until_ready(run(state))
(file,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
names = set()
for plane in jax.profiler.ProfileData.from_file(file).planes:
    if "GPU" in plane.name:
        names |= {event.name for line in plane.lines for event in line.events}
every = {c.name for c in selection.candidates(problems.Matmul) if c.tiled}
planned = sorted((dense | head) & every | experts)
print(json.dumps({"planned": planned, "attention": attends, "names": sorted(names)}))
"""


def seen(source: str, rows: int, tokens: int, folder: Path) -> dict:
    """Without command buffers, in whose place a profiler sees one graph."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_command_buffer=", "PYTHONPATH": str(ROOT)}
    arguments = [source, str(rows), str(tokens), str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (8, 1), (64, 1), (1, 512)])
@pytest.mark.parametrize("format", ["q1_0", "q4_k_m", "q8_0"])
def test_a_profiler_sees_the_kernels_of_the_plan(format, rows, tokens, tmp_path):
    found = seen(f"synth:tiny-llama:{format}", rows, tokens, tmp_path)
    check_products(found)
    attention = {"decode": "decode_attention"}.get(found["attention"], found["attention"])
    assert any(name.startswith(attention) for name in found["names"]), found["names"]


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (64, 1), (1, 512)])
def test_a_profiler_sees_the_kernels_of_experts(rows, tokens, tmp_path):
    check_products(seen("synth:tiny-qwen3moe:q4_k", rows, tokens, tmp_path))


def check_products(found: dict):
    products = {"bit_decode_b1", "bit_decode_s8", "bit_prefill_sm90"}
    products |= {"int_decode", "int_prefill_sm90", "int_experts"}
    ran = {kernel for kernel in products if any(name.startswith(kernel) for name in found["names"])}
    ran |= {"grouped"} if any(name.startswith("expert_places") for name in found["names"]) else set()
    print(found["planned"], found["attention"], sorted(ran))
    assert ran == set(found["planned"])
