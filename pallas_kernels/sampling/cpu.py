"""The draw of a token on a CPU, in one call for all rows."""

import jax
import jax.numpy as jnp

from pallas_kernels.sampling.rules import Rules


def run(logits: jax.Array, rules: Rules, keys: jax.Array, positions: jax.Array):
    """pallas_kernels.sampling.draw, with a call for each entry of vmap. A row's draw does not depend on the
    others."""
    return jax.custom_batching.sequential_vmap(_draw)(logits.astype(jnp.float32), rules, keys, positions)


def _draw(logits: jax.Array, rules: Rules, keys: jax.Array, positions: jax.Array):
    from pallas_kernels.cpu import draw  # needs the extra `cpu`

    rows, vocabulary = logits.shape
    arrays = rules._asdict() | {"logits": logits, "keys": keys, "positions": positions}
    operands = [arrays[name] for name in draw.FIELDS if arrays[name] is not None]
    results = (
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct(rules.seen.shape, rules.seen.dtype),
        jax.ShapeDtypeStruct(rules.counts.shape, rules.counts.dtype),
        jax.ShapeDtypeStruct((rows, *draw.workspace(vocabulary)), jnp.float32),
    )
    places = {draw.FIELDS.index(name): draw.RESULTS.index(name) for name in ("seen", "counts")}
    kernel = draw.Kernel(rules.allowed is not None)
    call = jax.ffi.ffi_call(kernel.target(), results, input_output_aliases=places)
    return call(*operands)[:3]
