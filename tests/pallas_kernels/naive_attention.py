"""Attention in float64, query by query: an oracle that needs nothing but numpy, as GPU machines have it."""

import numpy as np


def naive_attention(q, k, v, positions, window=None, scale=None, softcap=None, sinks=None):
    """One row, float64, query by query. q [T, H, D], k [S, Hkv, D], v [S, Hkv, V], sinks [H]."""
    T, H, D = q.shape
    scale = 1 / np.sqrt(D) if scale is None else scale
    out = np.zeros((T, H, v.shape[-1]))
    for t in range(T):
        if positions[t] < 0:
            continue
        for h in range(H):
            kv_head = h // (H // k.shape[1])
            first = 0 if window is None else max(0, positions[t] + 1 - window)
            keys, values = k[first : positions[t] + 1, kv_head], v[first : positions[t] + 1, kv_head]
            scores = scale * keys @ q[t, h]
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            sink = -np.inf if sinks is None else float(sinks[h])
            highest = max(scores.max(), sink)
            weights = np.exp(scores - highest)
            out[t, h] = weights / (weights.sum() + np.exp(sink - highest)) @ values
    return out
