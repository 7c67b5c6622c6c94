"""Many requests at once (docs/engine.md).

    engine.py     Engine: takes requests from any thread; its own thread turns the loop
    handle.py     Handle: a request's answers, as they come
    loop.py       requests to plans, what they drew to text
    runner.py     plans to dispatches: the state of all rows, and the thread that dispatches
    scheduler.py  who runs next: rows, chunks of prompts, steps       } plain Python,
    plans.py      requests, plans and limits, as it speaks of them    } without tensors
    pages.py      whose pages are whose                               }
    prefix.py     which pages hold which tokens                       }
    rows.py       prefill and decode of some rows: functions of arrays
    simulate.py   the scheduler without a device: measured times in place of work

A request on its way: tokens of its prompt -> a row and pages, those that are known already shared ->
chunks of the prompt through prefill, the last of which draws -> steps of decode with all other rows, many
a dispatch -> ids on the host, text to the Handle, while the device is at the next dispatch.
"""

from bonsai_jax.engine.engine import Engine
from bonsai_jax.engine.handle import Handle

__all__ = ["Engine", "Handle"]
