"""Compile for a GPU on a machine without one: real code for the target, with its memory analysis.

`data/nvidia_h200.txtpb` was dumped on an H200 by
jax._src.lib.xla_client.get_topology_for_devices(jax.devices()).target_config. Nothing is autotuned here, so
XLA's own choice of GEMMs is not what the GPU will run; Mosaic kernels are. An LLVM error, such as an
instruction that the target lacks, aborts the whole process.
"""

import functools
import multiprocessing
import os
import re
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding, use_abstract_mesh

import bonsai_jax as bj
from bonsai_jax.decoding import sampling
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.network import architectures
from bonsai_jax.network import cache as kv
from bonsai_jax.network import params as network_params
from bonsai_jax.weights import plan as load_plans
from checkpoints import open_checkpoint
from pallas_kernels import device

TARGETS = [(8, 0), (8, 9), (9, 0)]  # compute capabilities: every kernel is compiled for them (slow)
OTHERS = [(8, 6), (10, 0), (12, 0)]  # one of each kind is


def for_target(capability, *values, slow=False):
    """Values of a test's parameters, the last of which is the target; xdist (--dist loadgroup) runs all tests
    of a target in one worker, so that they share one process; those of Hopper, the most, in two."""
    half = zlib.crc32(repr(values).encode()) % 2 if capability == (9, 0) else 0
    marks = [pytest.mark.xdist_group(f"{capability} {half}"), *([pytest.mark.slow] if slow else [])]
    return pytest.param(*values, capability, marks=marks)


def _start(output: Path):
    """Of a process that compiles: what it prints, from C too, goes to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    jax.config.update("jax_platforms", "cpu")


class Compilers:
    """A process for each target: a process keeps what it compiled for one, LLVM aborts at what a target
    lacks, and ptxas prints from C."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, {}

    def printed(self, capability, f, *arguments) -> str:
        """What f(*arguments) prints in the process of a target. If that dies, the test fails with what LLVM
        said, and the next test has a new process."""
        output = self.folder / str(capability)
        if capability not in self.processes:
            context = multiprocessing.get_context("spawn")
            self.processes[capability] = ProcessPoolExecutor(1, context, _start, (output,))
        try:
            self.processes[capability].submit(f, *arguments).result()
        except BrokenProcessPool:
            self.processes.pop(capability).shutdown()
            died = f"The process that compiles for {capability} died:\n{output.read_text()}"
            pytest.fail(died, pytrace=False)
        finally:
            text = output.read_text()
            os.truncate(output, 0)
            if sys.exception() is not None:  # the failed test shows what was printed
                print(text)
        return text

    def close(self):
        for process in self.processes.values():
            process.shutdown()


@functools.cache
def _topology(capability, devices=1):
    major, minor = capability
    text = (Path(__file__).parents[1] / "data" / "nvidia_h200.txtpb").read_text()
    if capability != (9, 0):
        features = "feature_extension: ACCELERATED_FEATURES" * (major >= 9)  # "sm_120a"
        described = f"cuda_compute_capability {{ major: {major} minor: {minor} {features} }}"
        text = re.sub(r"cuda_compute_capability \{[^}]*\}", described, text)
        text = re.sub(r"Compute Capability [0-9.]+a?", f"Compute Capability {major}.{minor}", text)
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x1x{devices}")


def as_on_a_gpu(capability):
    """Choose implementations as a GPU of this compute capability would."""
    return mock.patch.object(device, "default", lambda: device.GPUS["sm_{}{}".format(*capability)])


def shapes(source, rows=1, context=2048, cache_dtype="bfloat16", draft=False):
    """Shapes of a model's weights and of a generation state, as a GPU would hold them; nothing is
    allocated. draft: with its draft layer."""
    run = bj.RunConfig(weights="packed", cache_dtype=cache_dtype, draft=draft)
    plan = load_plans.plan(architectures.describe(open_checkpoint(source), draft=draft), run)
    params, config = jax.eval_shape(lambda: network_params.load(plan)), plan.config

    def state():
        cache = kv.empty(config, plan.run, rows, context)
        sampler = sampling.sampler(bj.SamplingParams(seed=0), rows, config.vocab_size)
        return decoding.start(cache, sampler, jnp.zeros((rows, 2), jnp.int32), jnp.ones(rows, jnp.int32))

    return params, jax.eval_shape(state), config


def compile_for_gpu(f, *shapes, compute_capability=(9, 0), **jit_options):
    """jit(f) compiled for arguments of these shapes (any pytrees of them; static arguments go into `f`)."""
    return lower_for_gpu(f, *shapes, compute_capability=compute_capability, **jit_options)[0].compile()


def lower_for_gpu(f, *shapes, compute_capability=(9, 0), **jit_options):
    """The same, lowered, and the sharding of its arguments: the GPU's."""
    mosaic_utils._infer_arch = lambda: compute_capability  # without a device, Mosaic assumes 9.0
    topology = _topology(compute_capability)
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = SingleDeviceSharding(topology.devices[0])
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)
    with use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f, **jit_options).lower(*arguments), sharding


def gpu_mesh(devices: int) -> Mesh:
    """A mesh of H200s that share weights, as placement.make_mesh makes it, to compile for."""
    grid = np.array(_topology((9, 0), devices).devices).reshape(1, devices)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def compile_for_mesh(f, mesh: Mesh, *arguments):
    """jit(f) compiled for (shape, dtype, PartitionSpec) each."""
    shapes = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, spec)) for s, d, spec in arguments]
    mosaic_utils._infer_arch = lambda: (9, 0)
    with use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f).lower(*shapes).compile()
