"""What a warp of decode attention does: 16 keys at a time.

    lane = 4 g + t    of the scores                    of the weighted values
    keys, values      keys g and g + 8,                keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9,
                      dimensions 32 c + 8 t + i        dimensions 64 c + 8 g + i
    queries, weights  column g, the same dimensions    column g, the same keys
    results           the same keys,                   the same dimensions,
                      columns 2 t and 2 t + 1          columns 2 t and 2 t + 1

(i from 0 to 7: loads of 16 bytes, if numbers have two. Which of a head's dimensions a lane has is free, as
long as q and k agree.) Tensor cores multiply pairs of 16-bit numbers, the cache layout's OPERAND; queries and
weights are split into two of them, whose sum has 16 bits of mantissa in bfloat16 and 22 in float16. Keys, or
dimensions of values, are the 16 rows of a tensor core. Of its 8 columns a head has 2, of the high and of the
low parts, and lane 4 g + t head t; of 5 to 7 heads each has one, the parts are multiplied one after the
other, and the lane has heads 2 t and 2 t + 1.

Keys and values of a warp's first visit are on their way before q arrives; those of later visits are requested
as soon as their place has been read (decode_sources.py). A warp weighs the values of its own keys
(decode_registers.py); where these lie in shared memory, and one visit is enough, some dimensions of all keys
of its team (decode_values.py).
"""

import dataclasses

import jax

from pallas_kernels.attention import decode_registers, decode_sources, decode_values
from pallas_kernels.attention.decode_cache import LayerShare, team_barrier, team_begin, team_owner
from pallas_kernels.attention.decode_keys import Warp
from pallas_kernels.attention.decode_plan import KEYS
from pallas_kernels.attention.decode_token import NewToken
from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import index, integer


def attend(work: LayerShare, smem, slots, load_qkv, give, next_layer=None, asked=None, loaded=None):
    """The weighted values of a team's split, the sums of their weights and the largest scores, to `give`.

    slots       a warp's places by its number: the address of its `visit_bytes` of shared memory, and the same
                xor that of its second, 0 if it has none, None if no warp has; None: keys and values go to
                registers
    load_qkv    as for `decode.Attention.run`
    give        gets decode_splits.Block or decode_values.Dimensions, and whether the split may be its row's
                only one (`may_be_alone`); called once, but traced twice
    next_layer  (a layer, whether its first keys and values are asked for, into the L2 cache), or None
    asked       whether this warp's first keys are on their way to the slot (`copy_first`); None: they are not
    loaded      as for `decode.Attention.run`
    """
    plan, share, warp = work.plan, work.share, Warp.locate(work)
    first, step = share.start + warp.number * KEYS, KEYS * plan.team
    slot = None if slots is None else slots(integer(lanes.thread() // 32))
    # Before q is asked for, which other blocks may still be making.
    source, carry = decode_sources.begin(warp, first, step, slot, asked)
    if next_layer is not None:
        layer, few = next_layer
        with lanes.when(few):
            decode_sources.prefetch(dataclasses.replace(work, layer=layer))
    token = NewToken(plan, work.cache, share, work.layer, smem, team_begin(plan))
    token.make(load_qkv, loaded)
    team_barrier(plan)()

    def work_of_visit():
        """`work`. A warp that is alone with its row has few registers, so it computes row and heads again."""
        if plan.team > 1:
            return work
        _, row, heads, _ = team_owner(plan)
        return dataclasses.replace(work, share=dataclasses.replace(share, row=row, heads=heads))

    def source_at(base, carry):
        warp = Warp.locate(work_of_visit(), index(lanes.opaque(integer(work.layer))))  # few registers
        return source(warp, token, lanes.opaque(integer(base)), carry=carry)

    def visit_own_keys():
        def next_visit(base, carry):
            state, carry = jax.tree.unflatten(structure, carry)
            keys = source_at(base, carry)
            return jax.tree.leaves((decode_registers.visit(keys, state), keys.carry))

        begun, structure = jax.tree.flatten((decode_registers.begun(plan, warp.heads), carry))
        state = lanes.loop(first, share.stop, step, begun, next_visit)
        return decode_registers.joined(plan, smem, warp.heads, jax.tree.unflatten(structure, state)[0])

    if slots is None or not plan.in_one_visit:
        give(visit_own_keys())
        return
    one_visit = share.stop - share.start <= step
    with lanes.when(one_visit):
        give(decode_values.visited(source_at(first, carry), slots, smem))
    with lanes.when(~one_visit):
        # A row's only split is mostly of one visit. Where it always is, more code would take room (LOG.md).
        give(visit_own_keys(), may_be_alone=plan.keys_of_one_split > step)
