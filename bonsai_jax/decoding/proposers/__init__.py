"""Proposers of tokens for speculation, one file each, named as `speculate=` and `--speculate` name them.

A proposer module defines

    propose(params, state, config, count)  -> int32 [B, count], state: what it takes to follow each row's
                           newest token, NO_TOKEN from where it has no idea. Pure, traced; of a decoding.State
                           it may read everything, and change what is the draft layer's
    DRAFTS                 whether it needs the draft layer (RunConfig.draft)

A proposal costs time if it is wrong, and never changes the text. `get(name)` imports by file name, so a new
file is a new proposer.
"""

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """Every proposer there is a file for."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    """The module of a proposer. Raises NotImplementedError, with the list, if there is none."""
    if name not in names():
        raise NotImplementedError(f"speculate is {name!r}; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")
