"""Kernels of the kernels in numpy, all threads in lockstep: their arithmetic, and who waits for
whom, on a machine without a GPU.

`with lockstep(): decode_layers(...)` runs the traced function of each kernel as it is, with numpy arrays of
all threads in place of MLIR's values; the dialects (values.py) and PTX (ptx.py) are replaced, and loops,
branches and waiting in lanes.py (machine.py).
"""

import contextlib
import functools
import importlib
import pkgutil
import sys
import types
from unittest import mock

import jax
import numpy as np
from jax._src.lib.mlir import dialects, ir
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.attention import decode, prefill_heads
from pallas_kernels.delta import chunks as delta_chunks
from pallas_kernels.delta import inputs as delta_inputs
from pallas_kernels.delta import step as delta_step
from pallas_kernels.experts import choice, places, router_logits
from pallas_kernels.experts import int_experts as int_experts
from pallas_kernels.gpu import lanes, launch
from pallas_kernels.gpu import values as gpu_values
from pallas_kernels.latent import decode as latent_decode
from pallas_kernels.matmul import activations_rotated
from pallas_kernels.matmul.bit_mma import activations as activations_int8
from pallas_kernels.matmul.bit_mma import decode as bit_decode
from pallas_kernels.matmul.bit_mma import quantize_rows
from pallas_kernels.matmul.int_mma import activations_float16
from pallas_kernels.matmul.int_mma import decode as int_decode
from pallas_kernels.matmul.int_mma import dequantize as int_dequantize
from pallas_kernels.sampling import kernel as sampling
from pallas_kernels.step import decode_layers, experts_layers, int_layers, layer_products
from tests.pallas_kernels.lockstep import ptx, values
from tests.pallas_kernels.lockstep.machine import Machine

# Of plgpu, as they are.
PLAIN = ("RefType", "SMEM", "CompilerParams", "Layout", "TilingTransform", "SwizzleTransform")


class _Running:
    """The dialects' functions that need to know which threads are active."""

    machine: Machine

    def __init__(self, at_a_time: int | None):
        self.at_a_time = at_a_time

    def patches(self) -> dict:
        """{name in modules of pallas_kernels: (what it is there, what takes its place)}."""
        call = lambda name: lambda *args: getattr(self.machine, name)(*args)  # noqa: E731
        llvm = types.SimpleNamespace(
            inline_asm=lambda *args, **kw: ptx.inline_asm(self.machine, *args, **kw),
            StructType=types.SimpleNamespace(get_literal=list),
            GEPNoWrapFlags=types.SimpleNamespace(none=None),
            extractvalue=lambda type, of, at: of[at[0]],
            bitcast=values.reinterpreted,
            ptrtoint=lambda type, v: values.Value(v.a, type),
            getelementptr=lambda type, base, indices, _, element, flags: values.arith.addi(
                base,
                values.Value(indices[0].a * values.NUMPY[element.element].itemsize, base.type),
            ),
        )
        vector = types.SimpleNamespace(
            **vars(values.vector), load=call("load_vector"), store=call("store_vector")
        )
        mosaic = types.SimpleNamespace(
            shfl_bfly=lambda x, distance: ptx.butterfly(self.machine, x, distance),
            memref_ptr=lambda ref: self.machine.address(ref),
            bitwidth=lambda type: 8 * values.NUMPY[type.element].itemsize,
        )
        faked = {
            "ir": (ir, values.ir),
            "arith": (dialects.arith, values.arith),
            "llvm": (dialects.llvm, llvm),
            "vector": (dialects.vector, vector),
            "memref": (dialects.memref, types.SimpleNamespace(load=call("load"), store=call("store"))),
            "gpu": (dialects.gpu, types.SimpleNamespace(barrier=call("barrier"))),
            "mlir_math": (dialects.math, values.math),
            "mosaic": (utils, mosaic),
            "Value": (gpu_values.Value, values.Value),
        }
        fake = types.SimpleNamespace(
            kernel=functools.partial(_kernel, self),
            inline_mgpu=lambda **_: lambda f: lambda *refs: f(None, *refs),
            **{name: getattr(plgpu, name) for name in PLAIN},
            LoweringSemantics=plgpu.LoweringSemantics,
        )
        faked["plgpu"] = plgpu, fake
        control = ("when", "loop", "choose", "repeated")
        return faked | {name: (getattr(lanes, name), call(name)) for name in control}


class _Ref:
    """In place of jax.Ref, of which each shape would be copied, read and written by programs of its own."""

    def __init__(self, x):
        self.contents = np.array(x)
        self.shape, self.dtype, self.size = self.contents.shape, self.contents.dtype, self.contents.size


def _kernel(running: _Running, body, *, out_type, grid, num_threads, scratch_types, **_):
    """In place of plgpu.kernel."""
    outs = out_type if isinstance(out_type, tuple) else (out_type,)
    at_a_time = running.at_a_time or grid[0]

    def run(*operands):
        written = [isinstance(o, _Ref) for o in operands]
        arrays = [o.contents if w else np.array(o) for o, w in zip(operands, written, strict=True)]
        written += [True] * len(outs)
        arrays += [np.full(out.shape, -1 if out.dtype.kind == "i" else np.nan, out.dtype) for out in outs]
        for first in range(0, grid[0], at_a_time):
            numbers = range(first, min(first + at_a_time, grid[0]))
            scratch = [(s.shape, s.dtype) for s in scratch_types]
            machine = running.machine = Machine(numbers, 128 * num_threads, scratch)
            refs = [
                machine.ref(a, f"argument {i} {a.shape}", tracked=changes)
                for i, (a, changes) in enumerate(zip(arrays, written, strict=True))
            ]
            body(*refs, *machine.scratch)
        results = tuple(map(jax.device_put, arrays[len(operands) :]))  # jnp.asarray compiles for each shape
        return results if isinstance(out_type, tuple) else results[0]

    return run


def launched(body, out_type, scratch, *operands):
    """`body`, which is traced as a kernel is, by one warpgroup; inside of `lockstep`."""
    plgpu = launch.plgpu  # lockstep's own
    return plgpu.kernel(body, out_type=out_type, grid=(1,), num_threads=1, scratch_types=scratch)(*operands)


@contextlib.contextmanager
def lockstep(at_a_time: int | None = None):
    """Kernels run in numpy; at_a_time: blocks in step, for kernels whose blocks do not meet."""
    running = _Running(at_a_time)
    kernels = [
        *((bit_decode, "bit_decode"), (quantize_rows, "quantize_rows")),
        *((int_decode, "int_decode"), (int_dequantize, "int_dequantize")),
        *((activations_int8, "activations_int8"), (activations_float16, "activations_float16")),
        (activations_rotated, "activations_rotated"),
        *((decode, "decode_attention"), (decode_layers, "decode_layers"), (sampling, "draw")),
        (prefill_heads, "prefill_heads"),
        *((layer_products, "layer_products"), (delta_step, "delta_step")),
        *(
            (delta_chunks, "delta_chunks"),
            (delta_inputs, "delta_inputs"),
            (int_experts, "int_experts"),
            (int_experts, "choosing_experts"),
            (experts_layers, "experts_layers"),
            (int_layers, "int_layers"),
        ),
        *((places, "expert_places"), (choice, "route"), (router_logits, "router_logits")),
        (latent_decode, "latent_decode"),
    ]
    for found in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
        if found.name != "pallas_kernels.attention.triton":  # needs its extra, and is no kernel of Mosaic's
            importlib.import_module(found.name)  # formats and layouts import what they need when it is needed
    modules = [module for name, module in sys.modules.items() if name.startswith("pallas_kernels.")]
    with contextlib.ExitStack() as stack:
        for name, (real, fake) in running.patches().items():
            for module in modules:
                if vars(module).get(name) is real:
                    stack.enter_context(mock.patch.object(module, name, fake))
        for module, name in kernels:
            stack.enter_context(mock.patch.object(module, name, getattr(module, name).__wrapped__))
        stack.enter_context(mock.patch.object(jax, "new_ref", _Ref))
        stack.enter_context(mock.patch.object(jax, "freeze", lambda ref: jax.device_put(ref.contents)))
        # What vmap would make of a kernel is no matter here, and would trace it.
        stack.enter_context(mock.patch.object(jax.custom_batching, "sequential_vmap", lambda f: f))
        stack.enter_context(np.errstate(all="ignore"))
        yield
