"""Layers that a backward pass computes again, and where the residual stream between them waits for it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from bonsai_jax.choices import Remat

STREAM = "residual stream"  # the name under which jax moves it to the host's memory
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=(),
    names_which_can_be_offloaded=(STREAM,),
    offload_src="device",
    offload_dst="pinned_host",
)
# The residual stream [B, T, H] and a turn of a loop -> the stream after its layers, and what taps read.
Turn = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def recomputed(turn: Turn, remat: Remat) -> Turn:
    """A turn that stores only the stream it was given for the backward pass.

    With "offload" the stream is copied to pinned memory of the host in the forward pass and back in the
    backward pass. Where the device is the host (on CPUs) nothing is copied.
    """
    if remat != "offload":
        return jax.checkpoint(turn)
    return jax.checkpoint(lambda x, number: turn(checkpoint_name(x, STREAM), number), policy=OFFLOAD)
