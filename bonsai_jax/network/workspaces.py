"""Workspaces in which attention's kernel exchanges partial results, for one decode step.

Each group of layers has its own. A layer tells its words from those of the layer before by its index in the
group (gpu/exchange.py), and writes them where that layer did. Layers of different groups may have the same
index, and with another window they share keys out otherwise.
"""

import jax

from bonsai_jax.config import ModelConfig
from bonsai_jax.network.cache import KVCache
from pallas_kernels.attention import empty_workspace
from pallas_kernels.latent import empty_latent_workspace

type Workspaces = dict[tuple[str, int], jax.Array]  # by kind and group


def empty(config: ModelConfig, cache: KVCache, rows: int) -> Workspaces:
    """Those of all groups whose layers store keys, or rows of latent attention."""
    groups = zip(config.groups("attention"), cache.states.get("attention", ()), strict=True)
    spaces = {
        ("attention", number): empty_workspace(rows, group.settings.num_heads, state.k)
        for number, (group, state) in enumerate(groups)
        if state.k is not None
    }
    kind = "latent_attention"
    latent = zip(config.groups(kind), cache.states.get(kind, ()), strict=True)
    for number, (group, state) in enumerate(latent):
        sizes = rows, group.settings.num_heads, state.k, cache.block_table
        spaces[kind, number] = empty_latent_workspace(*sizes)
    return spaces
