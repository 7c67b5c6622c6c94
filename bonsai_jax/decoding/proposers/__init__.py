"""Proposers of tokens for speculation, one file each, named as `speculate=` and `--speculate` name them.

A proposer module defines

    propose(params, state, config, count)  -> int32 [B, count], state: the tokens that it expects after each
                           row's newest token, then NO_TOKEN. Pure and traced. It may read all of the State,
                           and change State.speculation.draft
    MOST                   most tokens that it proposes for a row
    TRUST                  the share of its proposals that is taken to be right before any was checked
    MEMORY                 a row's trust is the share of right proposals among about this many latest checks
    ALONE                  plain steps between two looks for proposals, where no row trusts them
    time(params, config)   -> float, the time in which it proposes a token for each row, relative to a plain
                           step. If above 0, it proposes nothing where that does not pay
    LOADS                  what it needs the model to be loaded with: the field of RunConfig, "draft" (the
                           file's draft layer) or "draft_model"; None: nothing. If anything, also
    follow(params, state, hidden, tokens, positions, config)  -> State.speculation.draft after the tokens at
                           these positions (-1: none), which the model has read; hidden: what it made of them
    unread(draft, first, most)  -> what stands for State.speculation.draft while up to `most` tokens of each
                           row from position `first` on are read that it reads afterwards, and gets them by
                           `follow`; None: it needs nothing of them. Where `time` is above 0
    follow_and_guess(params, state, unread, tokens, positions, config)  -> State.speculation.draft as from
                           `follow`, and int32 [B, T]: the token that it would have proposed after each of
                           these, where it says so, else NO_TOKEN. Where `time` is above 0: it then gets the
                           tokens of several plain steps together, and its guesses say whether it should
                           propose again

A wrong proposal costs time but does not change the text. `get(name)` imports by file name, so a new file is a
new proposer.
"""

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """The names of all proposers."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    """The module of a proposer. Raises NotImplementedError, with the list, for another name."""
    if not isinstance(name, str):
        raise TypeError(f"speculate is a {type(name).__name__}; give one of {', '.join(names())}")
    if name not in names():
        raise NotImplementedError(f"speculate is {name!r}; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")
