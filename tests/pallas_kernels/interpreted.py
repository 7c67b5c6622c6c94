"""The kernels of attention of many queries in jax's interpreter of Mosaic GPU kernels: barriers, copies,
which steps they visit and what they mask, without a GPU.

    with interpreted():
        prefill_attention(q, k_pages, v_pages, block_table, positions, layer)

The interpreter has neither mma, nor wgmma with an operand in registers, nor inline MLIR: these are
replaced.
"""

import contextlib
from unittest import mock

import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.attention import prefill_sm80, prefill_sm90

_wgmma = plgpu.wgmma


class _Sum:
    """In place of an accumulator in registers."""

    def __init__(self, value):
        self.value = value


def _run_state(body):
    def run(start):
        accumulator = _Sum(start)
        body(accumulator)
        return accumulator.value

    return run


def _multiply(accumulator, a, b):
    if isinstance(accumulator, _Sum):
        accumulator.value = _mma(accumulator.value, a, b[...])
    else:
        _wgmma(accumulator, a, b)


def _mma(accumulator, a, b):
    return accumulator + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def _bring(numbers, source, table, target):
    """A step's keys or values, of one page: test_lockstep_attention.py has how bring_by_lane copies them."""
    step, row, layer, kv_head = numbers
    page_size, first = source.shape[2], step * prefill_sm80.KEYS
    assert page_size % prefill_sm80.KEYS == 0
    page = table[row, jnp.minimum(first // page_size, table.shape[1] - 1)]
    target[...] = source[layer, page, pl.ds(first % page_size, prefill_sm80.KEYS), kv_head]


def _deallocate(barrier):
    """Without the demand that every phase was waited for: the last that a slot is free is of no use."""
    with barrier.cv:
        barrier.ref_count -= 1


@contextlib.contextmanager
def interpreted(multiprocessors: int = 3):
    """prefill_sm80 and prefill_sm90 on a GPU of so many multiprocessors."""
    with contextlib.ExitStack() as stack:
        for patched, name, replacement in (
            (device, "multiprocessors", lambda: multiprocessors),
            (prefill_sm90.pl, "run_state", _run_state),
            (plgpu.ACC, "init", staticmethod(lambda start: start)),
            (plgpu, "wgmma", _multiply),
            (plgpu, "mma", _mma),
            (prefill_sm80, "_bring", _bring),
            (prefill_sm80, "_commit", lambda: None),
            (prefill_sm80, "_arrived", lambda: None),
            (prefill_sm80, "_as_operand", lambda p: p),
            (shared_memory.Barrier, "deallocate", _deallocate),
        ):
            stack.enter_context(mock.patch.object(patched, name, replacement))
        stack.enter_context(plgpu.force_gpu_interpret_mode())
        yield
