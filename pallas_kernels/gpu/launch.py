"""Kernels whose bodies say what each lane does."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    body: Callable[..., None],
    operands: dict[str, Any],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    name: str,
    blocks: int,
    threads: int,
    scratch: dict[str, Any] | None = None,
) -> Any:
    """body(**refs), traced with values.py's values for a lane of each of so many blocks of threads.

    operands  arrays, or trees of them, by the names that their refs have in the body; None stays None. What
              is a jax.Ref may be written
    results   by such names
    name      as profilers show it
    threads   of a block, a multiple of 128
    scratch   plgpu.SMEM by such names
    Returns a tuple of arrays as in `results`, or one that is alone.
    """
    trees = {name: jax.tree.structure(operand) for name, operand in operands.items()}
    names = [*results, *(scratch or {})]

    def kernel(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def traced(ctx, *refs):
            rest = iter(refs)
            named = {
                name: jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)])
                for name, tree in trees.items()
            }
            body(**named, **dict(zip(names, rest, strict=True)))

        traced(*refs)

    out_type = tuple(results.values())
    kernel_call = plgpu.kernel(
        kernel,
        out_type=out_type[0] if len(out_type) == 1 else out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        kernel_name=name,
        scratch_types=list((scratch or {}).values()),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel_call(*(leaf for operand in operands.values() for leaf in jax.tree.leaves(operand)))
