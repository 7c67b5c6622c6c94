"""Many requests at once (docs/engine.md).

    engine.py     Engine: takes requests from any thread; its own thread turns the loop
    handle.py     Handle: a request's answers, as they come
    answers.py    tokens to text: Reader, Piece, Output
    prompts.py    prompts as token ids or vectors, and checks of everything else in a request
    loop.py       requests to plans, tokens to text
    constrained.py  answers with constraints: masks and forced tokens
    runner.py     plans to dispatches: the state of all rows, and the thread that dispatches (or caller.py)
    scheduler.py  who runs next: rows, chunks of prompts, steps       } plain Python,
    plans.py      the scheduler's requests, plans and limits          } without tensors
    pages.py      which pages are in use                              }
    prefix.py     which pages hold which tokens                       }
    rows.py       prefill and decode of some rows: functions of arrays
    split_rows.py  the same with a step in two programs, for masks

A row is one sequence being generated. The life of a request: tokens of its prompt -> a row and pages, shared
where another prompt began alike -> prefill in chunks, the last of which draws the first token -> decode steps
with all other rows, many in a dispatch -> ids on the host and text to the Handle, while the device runs the
next dispatch.
"""

from bonsai_jax.engine.engine import Engine
from bonsai_jax.engine.handle import Handle

__all__ = ["Engine", "Handle"]
