"""Attention of a decode step, alone: QK-norm, rope, cache write and attention over pages.

    uv run python benchmarks/decode_attention.py [-m bonsai-8b,bonsai-4b,bonsai-1.7b] [--keys 128,2048,8192]
    uv run python benchmarks/decode_attention.py -m bonsai-8b --rows 64 --keys 8192 --cache-dtype float16,int8

Chained over the layers of one cache, which each call updates in place: a layer waits for the one before
because the pages go through all of them. Pages are in random order. `keys` counts the new token's. The bytes
are those of the keys and values that are visible, read once; the speed of light reads the same pages.
"""

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import one_op

from bonsai_jax import ModelConfig
from bonsai_jax.measure import bench
from bonsai_jax.network import architectures, rope
from checkpoints import open_checkpoint
from pallas_kernels import attend, cache_layouts, device, problems, selection
from pallas_kernels.attention import empty_workspace

EPS = 1e-6
# The new key and value are rounded to the cache's type, now and then to the neighbour of the definition's.
LIMITS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3, "int8": 1e-2}


def measure_one(
    arguments: argparse.Namespace, model: str, config: ModelConfig, rows: int, keys: int, dtype: str
) -> one_op.Row:
    page_size = arguments.page_size
    a = config.attention
    heads = (a.num_heads, a.num_kv_heads, a.head_dim)
    impl = selection.choose(problems.Attention(device.platform(), "decode", *heads, page_size, dtype))
    if keys % page_size:
        raise SystemExit(f"--keys {keys} is no multiple of the page size of {page_size}")
    moved = 2 * rows * keys * a.num_kv_heads * cache_layouts.bytes_per_head(dtype, a.head_dim)
    layers = one_op.layers_for(arguments, moved)
    pages = rows * keys // page_size

    draw = iter(jax.random.split(jax.random.key(0), 5))
    shape = (layers, pages, page_size, a.num_kv_heads, a.head_dim)
    stored = jax.jit(lambda key: cache_layouts.get(dtype).quantize(jax.random.normal(key, shape)))
    k_pages, v_pages = (stored(next(draw)) for _ in range(2))
    qkv = jax.random.normal(next(draw), (rows, 1, a.q_width + 2 * a.kv_width))
    table = jax.random.permutation(next(draw), pages).reshape(rows, -1).astype(jnp.int32)
    gammas = None, None
    if config.architecture == "qwen3":
        both = jax.random.split(next(draw))
        gammas = tuple(1 + 0.1 * jax.random.normal(key, (layers, a.head_dim)) for key in both)
    positions = jnp.full((rows, 1), keys - 1, jnp.int32)
    rest = {
        "rotation": rope.rotation(a.rope, rope.frequencies(a.rope), positions),
        "interleaved": a.rope.interleaved,
        "norms": gammas,
        "eps": EPS,
        "num_keys": keys,
    }

    def attend_all(pages, impl):
        out, workspace = None, empty_workspace(rows, a.num_heads, pages[0])
        for layer in range(layers):
            out, *pages, workspace = attend(
                qkv, *pages, table, positions, layer, **rest, impl=impl, workspace=workspace
            )
        return pages, out

    last = layers - 1
    one = jax.jit(
        lambda k, v, impl: attend(qkv, k, v, table, positions, last, **rest, impl=impl)[0],
        static_argnames="impl",
    )
    want = np.asarray(one(k_pages, v_pages, "reference"), np.float64)
    chain = jax.jit(lambda pages: attend_all(pages, impl), donate_argnums=0)
    pages, out = chain([k_pages, v_pages])
    error = float(np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want))

    counts = {"repetitions": arguments.repetitions, "calls": arguments.calls}
    state = (pages, out)
    times = bench.seconds_per_call(lambda state: chain(state[0]), state, **counts)
    pages = [stored(jax.random.key(i)) for i in range(2)]  # the others were donated
    light = one_op.light_seconds(jax.tree.leaves(pages), **counts)
    return one_op.row(
        arguments, times, light, moved, launches=layers, op=f"attention, {keys} keys, {dtype}", model=model,
        impl=impl, shape=" / ".join(map(str, heads)), rows=rows, layers=layers, error=error,
    )  # fmt: skip


def measure(arguments: argparse.Namespace) -> Iterator[one_op.Row]:
    for model in arguments.models.split(","):
        config = architectures.config_of(open_checkpoint(f"synth:{model}:q1_0"))
        for rows in map(int, arguments.rows.split(",")):
            for keys in map(int, arguments.keys.split(",")):
                for dtype in arguments.cache_dtype.split(","):
                    yield measure_one(arguments, model, config, rows, keys, dtype)


def main() -> None:
    parser = one_op.parser(__doc__.splitlines()[0], "bonsai-8b,bonsai-4b,bonsai-1.7b")
    parser.add_argument("--keys", default="128,2048,8192", help="visible keys a row, the new one among them")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--cache-dtype", default="bfloat16", help=f"some of {', '.join(LIMITS)}")
    arguments = parser.parse_args()
    limit = max(LIMITS[dtype] for dtype in arguments.cache_dtype.split(","))
    one_op.report_and_check(measure(arguments), arguments.output, limit)


if __name__ == "__main__":
    main()
