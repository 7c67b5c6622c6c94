"""What plans count as shared memory is what Mosaic asks for, and no more than a GPU has. Kernels are lowered
here without their bodies, before which Mosaic counts; compile tests lower the same kernels whole."""

import math
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.gpu import shared_memory
from pallas_kernels.step.decode_layers import Shapes
from tests.pallas_kernels.aot import as_on_a_gpu
from tests.pallas_kernels.aot_kernels import one_launch
from tests.pallas_kernels.test_aot import HOT, HOT_ON_HOPPER

KB = 1024
# Of a block of threads, by compute capability: CUDA C++ Programming Guide.
MOST = {
    (8, 0): 163 * KB,
    (8, 6): 99 * KB,
    (8, 9): 99 * KB,
    (9, 0): 227 * KB,
    (10, 0): 227 * KB,
    (12, 0): 99 * KB,
}
STATIC = 1  # byte of a kernel's shared memory that is not dynamic, as ptxas prints it
REDUCED = 2048  # for reductions of Mosaic's own layouts, which attention of many queries has
MODELS = {"8B": (36, 4096, 12288, 32, 8, 128), "4B": (36, 2560, 9728, 32, 8, 128)}
MODELS["1.7B"] = (28, 2048, 6144, 16, 8, 128)


def lowered(case, capability) -> tuple[list[int], list, list[int]]:
    """Of each launch the dynamic shared memory that it asks for, and its scratch; what plans have counted."""
    asked, scratch, planned = [], [], []
    size_of, kernel, bytes_taken = mosaic._smem_tree_size, plgpu.kernel, shared_memory.bytes_taken

    def recorded_size(tree):
        asked.append(size_of(tree))
        return asked[-1]

    def recorded_kernel(*args, scratch_types, **rest):
        scratch.append(scratch_types)
        return kernel(*args, scratch_types=scratch_types, **rest)

    def recorded_count(*buffers, barriers=0):
        planned.append(bytes_taken(*buffers, barriers=barriers))
        return planned[-1]

    jax.clear_caches()  # of what was traced for another GPU
    with (
        as_on_a_gpu(capability),
        mock.patch.object(mosaic, "_smem_tree_size", recorded_size),
        mock.patch.object(plgpu, "kernel", recorded_kernel),
        mock.patch.object(shared_memory, "bytes_taken", recorded_count),
        mock.patch.object(mosaic.utils, "_infer_arch", lambda: capability),
        mock.patch.object(lowering, "lower_jaxpr_to_mosaic_gpu", lambda *_: None),
    ):
        f, arguments = case()
        jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert asked and len(asked) == len(scratch)
    return asked, scratch, planned


def counted(scratch, reduces: bool) -> int:
    sizes, barriers = [REDUCED] * reduces, 0
    for ref in jax.tree.leaves(scratch):
        if isinstance(ref, plgpu.Barrier | plgpu.ClusterBarrier):
            barriers += math.prod(ref.num_barriers)
        else:
            sizes.append(math.prod(ref.shape) * np.dtype(ref.dtype).itemsize)
    return shared_memory.bytes_taken(*sizes, barriers=barriers)


# Others have as much as one of these.
EVERY_DAY = ((8, 0), (9, 0), (12, 0))
CASES = [
    pytest.param(name, capability, marks=[] if capability in EVERY_DAY else pytest.mark.slow)
    for name in HOT
    for capability in MOST
] + [(name, (9, 0)) for name in HOT_ON_HOPPER]


@pytest.mark.parametrize(("name", "capability"), CASES, ids=str)
def test_a_kernel_asks_for_what_is_counted_and_no_more_than_there_is(name, capability):
    asked, scratch, planned = lowered((HOT | HOT_ON_HOPPER)[name], capability)
    for size, of_launch in zip(asked, scratch, strict=True):
        assert size + STATIC <= MOST[capability]
        if size:
            assert counted(of_launch, "many queries" in name) == size + shared_memory.OWN_BYTES
            if planned and name.startswith("many: "):  # others' plans count more kernels than one
                assert size + shared_memory.OWN_BYTES in planned


# Rows of a step in one launch that an H200 has room for, and others: of each model the most.
ROOM = {((9, 0), "8B"): 24, ((9, 0), "4B"): 24, ((9, 0), "1.7B"): 24, ((10, 0), "8B"): 24}
ROOM |= {((12, 0), "8B"): 0, ((12, 0), "4B"): 0, ((12, 0), "1.7B"): 24}


# One row has another kernel than eight, nine are two tiles of eight; the last is the most.
@pytest.mark.parametrize("counts", [(1, 9, 24), pytest.param((2, 3, 8), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("capability", "model"), ROOM, ids=str)
def test_one_launch_is_refused_exactly_where_it_has_no_room(capability, model, counts):
    """Mosaic asks for a byte of its own."""
    (layers, *sizes), room = MODELS[model], {}
    for rows in counts:
        with as_on_a_gpu(capability):
            refused = Shapes(rows, *sizes, blocks=device.multiprocessors()).refuses()
        try:
            (asked,), _, _ = lowered(lambda rows=rows: one_launch(layers, *sizes, rows=rows), capability)
        except ValueError as error:
            assert "exceeds available shared memory" in str(error)
            asked = MOST[capability]
        room[rows] = asked + STATIC <= MOST[capability]
        assert room[rows] == (refused is None)
    most = max((rows for rows, there in room.items() if there), default=0)
    assert most == min(ROOM[capability, model], counts[-1])


def test_every_gpu_has_the_memory_of_its_compute_capability():
    assert {gpu.platform: gpu.shared_bytes for gpu in device.GPUS.values()} == {
        f"sm_{major}{minor}": most for (major, minor), most in MOST.items()
    }
