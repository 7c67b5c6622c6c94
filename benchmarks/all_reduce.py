"""Time a sum over devices, as a tensor parallel decode step needs two of in every layer: by NCCL, by XLA's own
one-shot kernel (each device reads all others' memory), and by one in Pallas; inside a CUDA graph or not.

    python benchmarks/all_reduce.py -d 4

A chain of 64 in one jit, each behind a small product that needs the one before; `alone` is the chain without
the sums. Nothing is multicast: NCCL_NVLS_ENABLE=0.
"""

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
import one_op
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import bonsai_jax as bj
from bonsai_jax import bench, card

CHAIN = 64
GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,COLLECTIVES"}
ONE_SHOT = {"xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE"}


def one_shot(x: jax.Array) -> jax.Array:
    """Sum over the mesh axis "model" of float32 [rows, width] by a Pallas kernel: each block waits until all
    devices have theirs, reads their parts from their memory, and waits until all have read its own."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    devices, part = jax.lax.axis_size("model"), 512
    flat = x.reshape(-1)
    assert flat.size % part == 0

    def body(x_gmem, out_gmem):
        here = pl.get_global(plgpu.SemaphoreType.REGULAR)
        read = pl.get_global(plgpu.SemaphoreType.REGULAR)
        me, blocks = jax.lax.axis_index("model"), flat.size // part
        at = pl.ds(jax.lax.axis_index("block") * part, part)

        def meet(semaphore):
            for i in range(1, devices):
                pl.semaphore_signal(semaphore, device_id={"model": jax.lax.rem(me + i, devices)})
            pl.semaphore_wait(semaphore, value=(devices - 1) * blocks, decrement=False)

        def remote(device):
            return plgpu.remote_ref(x_gmem, {"model": jnp.int32(device)})

        meet(here)
        layout = plgpu.Layout.WG_STRIDED((part,), vec_size=4)
        # In the same order on every device, so that all have the same sum.
        total = plgpu.load(remote(0), at, layout=layout, optimized=False)
        for device in range(1, devices):
            total += plgpu.load(remote(device), at, layout=layout, optimized=False)
        out_gmem[at] = total
        meet(read)

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(flat.shape, flat.dtype), grid=(flat.size // part,),
        grid_names=("block",),
    )  # fmt: skip
    return kernel(flat).reshape(x.shape)


def chain(total: Callable[[jax.Array], jax.Array], mesh, x: jax.Array) -> jax.Array:
    def on_device(x):
        devices = mesh.shape["model"]
        mine = (jax.lax.axis_index("model") + 1) / (devices * (devices + 1) / 2)  # all devices' sum to 1
        for _ in range(CHAIN):
            x = jax.lax.optimization_barrier(total(mine * x))
        return x

    return jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-d", "--devices", type=int, default=jax.device_count())
    p.add_argument("--width", type=int, default=8192)
    p.add_argument("--rows", default="1,8,64")
    p.add_argument("--only", help="variants, such as nccl,pallas")
    p.add_argument("-r", "--repetitions", type=int, default=5)
    p.add_argument("--commit", help="for a checkout without history")
    arguments = p.parse_args()
    mesh = bj.make_mesh(model=arguments.devices)
    psum = functools.partial(jax.lax.psum, axis_name="model")
    on_gpu = jax.default_backend() == "gpu"
    variants: dict[str, tuple[Callable, dict]] = {"alone": (lambda x: x, {}), "nccl": (psum, {})}
    if on_gpu:
        variants |= {
            "nccl, graph": (psum, GRAPH),
            "xla one-shot": (psum, ONE_SHOT),
            "xla one-shot, graph": (psum, ONE_SHOT | GRAPH),
            "pallas": (one_shot, {}),
        }
    for name in arguments.only.split(",") if arguments.only else variants:
        total, options = variants[name]
        for rows in map(int, arguments.rows.split(",")):
            x = jax.device_put(np.ones((rows, arguments.width), np.float32), NamedSharding(mesh, P()))
            try:
                step = jax.jit(functools.partial(chain, total, mesh), compiler_options=options)
                got = np.asarray(step(x))
                times = one_op.seconds_per_call(step, x, repetitions=arguments.repetitions, calls=4)
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, TypeError) as error:
                print(f"{name}, {rows} rows: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                break
            error = 0.0 if name == "alone" else float(np.abs(got - 1).max())
            us = [1e6 * t / CHAIN for t in times]
            row = {
                "date": bench.now(), "commit": arguments.commit or bench.commit(), "device": card.device_name(),
                "driver": card.driver(), "jax": jax.__version__, "op": "all-reduce", "impl": name,
                "devices": arguments.devices, "rows": rows, "width": arguments.width,
                "us": statistics.median(us), "us_min": min(us), "us_max": max(us), "error": error,
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
