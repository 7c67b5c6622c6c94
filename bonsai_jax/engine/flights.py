"""Dispatches whose results are not read yet, and the letters that draws among them wait for (mailbox.py)."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import jax

from bonsai_jax.engine.calls import Allowed
from bonsai_jax.engine.plans import Plan, Request
from bonsai_jax.engine.runner import Dispatch, Runner


@dataclasses.dataclass
class Flight:
    """A dispatch of a plan whose results are not read yet.

    rows    the places in its results of the requests that draw
    steps   of decode; 0: it is a prefill
    guesses columns at the end of its results that propose what follows (split_guesses.py)
    letters it takes letters from the mailbox
    waits   for letters that are not written yet
    """

    plan: Plan
    rows: list[tuple[int, Request]]
    dispatch: Dispatch
    steps: int = 0
    guesses: int = 0
    letters: bool = False
    waits: bool = False


class Letters:
    """Writes the letters of one loop's draws.

    allowed   what a request may draw next
    """

    def __init__(self, runner: Runner, allowed: Callable[[Request], Allowed | None]):
        self._runner, self._allowed = runner, allowed

    def write(self, flying: Iterable[Flight], pending: int) -> bool:
        """Write the letters that the next draw on the device waits for: masks, or to hold rows whose masks
        are late. False: it would draw nothing, because masks are late, so it is better to wait.

        flying   in the order of their dispatches
        pending  answers whose masks are being made
        """
        flight = next((flight for flight in flying if flight.letters), None)
        if flight is None or not flight.waits:
            return True
        requests = [request for _, request in flight.rows]
        draws = any(not r.constrained or (r.ready and not r.ended) for r in requests)
        if not draws and pending and any(r.late for r in requests):
            return False
        self.post(flight)
        return True

    def hold(self, flying: Iterable[Flight]) -> None:
        """Leave no draw on the device that waits for a letter. Whatever may load a program, or waits for the
        device, comes after it: while a draw waits, the driver may load none, and no other thread writes."""
        for flight in flying:
            if flight.waits:
                self.post(flight, hold=True)
            elif flight.letters:
                jax.block_until_ready(flight.dispatch.drawn.result())  # it has taken its letters

    def post(self, flight: Flight, hold: bool = False) -> None:
        """Write the letters of a draw. hold: each row's, in place of masks."""
        flight.waits, mailbox = False, self._runner.mailbox
        for request, row in itertools.chain(*flight.plan.draws):
            if not request.constrained or mailbox is None:
                continue
            allowed = None if hold or request.ended or not request.ready else self._allowed(request)
            if allowed is None:
                request.hold()
                mailbox.hold(row)
            else:
                request.ready = False
                mailbox.allow(row, allowed.masks[0])
