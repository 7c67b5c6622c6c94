"""Which places of a prompt get a saved state, for models that can continue only from one (prefix.py).

    | system and tools | earlier turns | question | calls and results ... | <assistant> | answer |
                       ^ head          ^ question departs                 ^ turn        ^        ^ end

A state can be saved only where a chunk of the prompt ends, so each place costs a dispatch. Who renders a
prompt knows the places where later ones will part ways with it, and names them (Engine.submit): a chat
template drops the thoughts of an answer from the history, so the next prompt departs where the answer began.
Where nobody names any, it is the last full page. The end of an answer is always one, unless a stop string or
the client ended it: the device has gone on then, and its state cannot go back (docs/engine.md).

A long prompt also leaves a state behind at some of the chunks that it is read in, for prompts that part ways
with it somewhere else. They are the first to be overwritten.
"""

from bonsai_jax.engine.prefix import Match


def cuts(match: Match, total: int, places: tuple[int, ...] | None, page_size: int) -> tuple[int, ...]:
    """Positions at which a chunk of a prompt ends, so that the state can be saved there.

    match   the beginning that is not read
    total   tokens of the prompt
    places  where later prompts will part ways with it; None: nobody knows
    """
    own = [(total - 1) // page_size * page_size] if places is None else sorted(places)
    able = [at for at in own if match.tokens < at < total]
    # Less than a page is too little to gain, except at the last place.
    worth = [at for at in (*able[:-1], match.known) if at - match.tokens >= page_size and at < total]
    return tuple(sorted({*worth, *able[-1:]}))


def passing(position: int, last: int, page_size: int) -> bool:
    """Whether a state is saved where a chunk happens to end, if the last one was saved after `last` tokens:
    their distances double, so a prompt has few of them however long it is."""
    return position % page_size == 0 and position >= 2 * last
