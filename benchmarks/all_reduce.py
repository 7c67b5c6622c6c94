"""Time a sum over devices, as a tensor parallel decode step needs two of in every layer: by NCCL, by XLA's
own one-shot kernel (each device reads all others' memory), and by the one in Pallas that writes into
mailboxes; inside a CUDA graph or not.

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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import bonsai_jax as bj
from bonsai_jax.measure import bench
from bonsai_jax.weights.placement import Placement

CHAIN = 64
GRAPH = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,COLLECTIVES"}
ONE_SHOT = {"xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE"}


def mailbox(y: jax.Array, peers: jax.Array) -> jax.Array:
    from pallas_kernels import all_reduce

    return all_reduce.receive(jnp.zeros_like(y), [all_reduce.send(y, peers)], peers)


def chain(total: Callable[[jax.Array, jax.Array], jax.Array], mesh, x: jax.Array, peers) -> jax.Array:
    def on_device(x, peers):
        devices = mesh.shape["model"]
        share = (jax.lax.axis_index("model") + 1) / (devices * (devices + 1) / 2)  # all devices' sum to 1
        for _ in range(CHAIN):
            x = jax.lax.optimization_barrier(total(share * x, peers[0, 0]))
        return x

    in_specs = (P(), P("data", "model"))
    return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)(x, peers)


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
    psum = lambda y, peers: jax.lax.psum(y, "model")  # noqa: E731
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:
        peers = Placement(mesh, "mailbox").peers()
    else:
        peers = jnp.zeros((1, arguments.devices, 1, 1), jnp.uint32)
    variants: dict[str, tuple[Callable, dict]] = {"alone": (lambda y, peers: y, {}), "nccl": (psum, {})}
    if on_gpu:
        variants |= {
            "nccl, graph": (psum, GRAPH),
            "xla one-shot": (psum, ONE_SHOT),
            "xla one-shot, graph": (psum, ONE_SHOT | GRAPH),
            "mailbox": (mailbox, {}),
        }
    for name in arguments.only.split(",") if arguments.only else variants:
        total, options = variants[name]
        for rows in map(int, arguments.rows.split(",")):
            x = jax.device_put(np.ones((rows, arguments.width), np.float32), NamedSharding(mesh, P()))
            try:
                jitted = jax.jit(functools.partial(chain, total, mesh), compiler_options=options)
                step = functools.partial(jitted, peers=peers)
                got = np.asarray(step(x))
                times = bench.seconds_per_call(step, x, repetitions=arguments.repetitions, calls=4)
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, TypeError) as error:
                print(f"{name}, {rows} rows: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                break
            error = 0.0 if name == "alone" else float(np.abs(got - 1).max())
            us = [1e6 * t / CHAIN for t in times]
            row = {
                **bench.origin(arguments.commit),
                "op": "all-reduce", "impl": name, "devices": arguments.devices, "rows": rows,
                "width": arguments.width, "us": statistics.median(us), "us_min": min(us), "us_max": max(us),
                "error": error,
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
