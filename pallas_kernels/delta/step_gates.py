"""Both gates of a head in the kernel of few tokens (step.py), which are products of the layer's input: made
by the head's block, or of sums that another launch has made of groups of columns.

    warps   part of the sum of x^2, and of both products -> shared memory -> sums over warps, 1 / rms
"""

from typing import Any

from pallas_kernels.delta.step_state import THREADS
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import fma, minimum, real, rsqrt, select, sum_of_squares, total

WARPS = THREADS // 32
GATES_TOGETHER = 4  # tokens whose parts of gates there are registers for


def parts_of_gates(head: Any, tokens: range) -> list:
    """This thread's parts of the x of these tokens, of gamma and of the rows of both gates; zeros of x behind
    its end."""
    gates = head.to_make
    hidden, parts = gates.x.type.shape[-1], []
    for first in range(0, hidden, 4 * THREADS):
        at = lanes.thread() * 4 + first
        inside = at < hidden
        start = select(inside, at, 0)
        places = [(gates.x, [head.own, head.row, token, start]) for token in tokens]
        places.append((gates.gamma, [head.layer, start]))
        places += [(gates.weights, [head.layer, head.head + which * head.heads, start]) for which in (0, 1)]
        *each_x, gamma, alpha, beta = (memory.load_reals(4, ref, place) for ref, place in places)
        each_x = [[select(inside, v, 0.0) for v in x] for x in each_x]
        parts.append((each_x, gamma, (alpha, beta)))
    return parts


def sum_parts(parts: list, tokens: range, gates_smem):
    """Of each token and each warp: the sum of squares of its part of x, and its part of both gates'
    products."""
    for i, token in enumerate(tokens):
        sums = [real(0)] * 3
        for each_x, gamma, rows in parts:
            x = each_x[i]
            sums[0] = sum_of_squares(x, sums[0])
            normed = [v * g for v, g in zip(x, gamma, strict=True)]
            for which, w in enumerate(rows):
                for a, e in zip(normed, w, strict=True):
                    sums[1 + which] = fma(a, e, sums[1 + which])
        _store_sums(sums, token, gates_smem)


def add_sums(head: Any):
    """Of each token and each warp the sum over its groups: of squares, and of both gates' products."""
    products, squares = head.sums
    groups, thread = products.type.shape[0], lanes.thread()
    each = [[real(0)] * 3 for _ in range(head.tokens)]
    for first in range(0, groups, THREADS):
        group = minimum(thread + first, groups - 1)
        for token, sums in enumerate(each):
            row = head.row * head.tokens + token
            own = [memory.load(squares, group, row)]
            own += [memory.load(products, group, row, head.head + i * head.heads) for i in (0, 1)]
            pairs = zip(sums, own, strict=True)
            each[token] = [so_far + select(thread + first < groups, v, 0.0) for so_far, v in pairs]
    for token, sums in enumerate(each):
        _store_sums(sums, token, head.gates_smem)


def _store_sums(sums: list, token: int, gates_smem):
    """A warp's sum of each."""
    for which, s in enumerate(map(lanes.warp_sum_real, sums)):
        with lanes.when(lanes.thread() % 32 == 0):
            memory.store(s, gates_smem, lanes.thread() // 32 + (3 * token + which) * WARPS)


def alpha_and_beta(gates_smem, token, hidden: int, eps: float):
    """Both gates of a token, after a block barrier; hidden: the width of x."""
    squares, alpha, beta = (
        total([memory.load(gates_smem, token * (3 * WARPS) + (i * WARPS + w)) for w in range(WARPS)])
        for i in range(3)
    )
    per_x = rsqrt(squares * (1 / hidden) + eps)
    return alpha * per_x, beta * per_x
