"""How blocks of decode.py put a row's sums together: a row's only split stores them; several send what they
have to each other, (o / l, m + log2 l) as in attention/decode_splits.py, and each makes its part of the
outputs.

Rows of latent attention are wide, and a row may have any number of splits. A lane takes 8 of them, for 4
neighbouring outputs, and as many neighbouring lanes as it takes have all.
"""

from pallas_kernels.attention.decode_splits import LOWEST, quotient, weighted
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange
from pallas_kernels.gpu.values import ceil_divided, greatest, integer, maximum, minimum, select
from pallas_kernels.gpu.values import total as added
from pallas_kernels.latent.plan import CHUNK, WARPS

EACH = 8  # splits of a lane


def combine(step, share, block, sums: list, exchange: Exchange):
    """sums: [pair of dimensions][eight of heads] -> 4, as latent_decode.Block has them."""
    plan = step.plan
    begin = (share.owner * plan.splits + share.split) * plan.partial

    def each(use):
        """use(head of the block, dimension, four neighbouring outputs)."""
        for n in range(plan.columns):
            for i in (0, 1):
                head = block.t * 2 + (8 * n + i)
                with lanes.when((head < plan.group) & (block.warp < plan.rank // CHUNK)):
                    total, _ = block.totals(head)
                    inverse = quotient(1.0, total)
                    values = [x * inverse for eights in sums for x in (eights[n][i], eights[n][2 + i])]
                    dimension = block.warp * CHUNK + block.g * 8
                    for first in (0, 4):
                        use(head, dimension + first, values[first : first + 4])

    def store(head, dimension, four):
        memory.store_reals(four, step.out, [share.row, share.heads + head, dimension])

    if plan.splits == 1:
        each(store)
        return
    with lanes.when(share.used == 1):
        each(store)
    with lanes.when(share.used != 1):
        thread = integer(lanes.thread())
        each(lambda head, dimension, four: exchange.send(begin + head * plan.rank + dimension, four))
        with lanes.when(thread < plan.group):
            total, largest = block.totals(thread)
            log_total = select(total > 0.0, largest + lanes.log2(total), LOWEST)
            exchange.send(begin + thread + plan.group * plan.rank, [log_total])
        _make(step, share, exchange, thread, store)


def _make(step, share, exchange: Exchange, thread, store):
    """This split's part of the outputs, of all splits' results."""
    plan = step.plan
    fours = plan.group * plan.rank // 4
    own = ceil_divided(integer(fours), share.used)
    shift = integer(0)
    for bits in range(1, 6):
        shift = select(share.used > EACH << (bits - 1), integer(bits), shift)
    together = integer(1) << shift
    lane, number = thread & (together - 1), thread >> shift

    def across(combined, x):
        """Over neighbouring lanes, as many as are together."""
        for distance in (1, 2, 4, 8, 16):
            x = select(together > distance, combined(x, lanes.swapped(x, distance)), x)
        return x

    splits = [minimum(lane * EACH + s, share.used - 1) for s in range(EACH)]
    begins = [(share.owner * plan.splits + split) * plan.partial for split in splits]
    # Who waits asks for few words; the others have mostly come when these have.
    exchange.receive([((begin, plan.group * plan.rank), 1) for begin in begins])

    def some(first, carry):
        at = integer(first) + number
        four = share.split * own + at
        exists = (at < own) & (four < fours)
        element = minimum(four, fours - 1) * 4
        head, dimension = element // plan.rank, element % plan.rank
        places = []
        for begin in begins:
            places += [((begin + element, 0), 4), ((begin + head, plan.group * plan.rank), 1)]
        loaded = exchange.receive(places)
        totals = [select(lane * EACH + s < share.used, loaded[5 * s + 4], LOWEST) for s in range(EACH)]
        largest = across(maximum, greatest(totals))
        weights = [lanes.exp2(m - largest) for m in totals]
        parts = [added(weights), *(weighted(weights, loaded[i::5]) for i in range(4))]
        total, *outputs = (across(lambda a, b: a + b, x) for x in parts)
        inverse = lanes.reciprocal(total)
        with lanes.when(exists & (lane == 0)):
            store(head, dimension, [x * inverse for x in outputs])
        return carry

    lanes.loop(0, own, (integer(32 * WARPS) >> shift), [], some)
