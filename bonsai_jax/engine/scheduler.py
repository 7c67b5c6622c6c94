"""Who runs next: requests, rows and pages of each device, as plain Python without tensors.

    waiting --admit--> reading (prefill, in chunks) --its last chunk draws--> writing (decode) --> ended
       ^                                                                         |
       `--------------------- pre-empted: its pages went to another -------------'

A plan is made before the results of the one before are known. So a request has bounds: `least` and `most`
tokens that work on its way will have drawn. Rows and pages that are given back are safe to give away at once,
as the device does one plan after another.
"""

import bisect
import dataclasses
import itertools

from bonsai_jax.engine.plans import Limits, Plan, Read, Request
from bonsai_jax.engine.prefix import Match, PrefixCache

PADDED = 3.5  # times the cost of a prefill is taken rather than another executable compiled
WAITING_STEPS = (4, 16)  # decode steps of a plan while requests wait for a row: at least, and at most


class Device:
    """Rows and pages of one device (of one part of the mesh's axis "data")."""

    def __init__(self, limits: Limits):
        self.prefix = PrefixCache(limits.pages, limits.page_size, limits.checkpoints)
        self.pages = self.prefix.pages
        self.free_rows = list(reversed(range(limits.max_rows)))
        self.running: list[Request] = []  # in order


class Scheduler:
    """Requests in, plans out. `unhurried`: steps of a plan when nobody waits for a row."""

    def __init__(self, limits: Limits, devices: int = 1):
        self.limits, self.devices = limits, [Device(limits) for _ in range(devices)]
        self.waiting: list[Request] = []
        self.unhurried = limits.steps
        self.compiled: set[int | tuple[int, int]] = set()  # of row_sizes and shapes
        self.preempted = 0  # times
        self._numbers = itertools.count()

    def add(self, request: Request) -> None:
        request.number = next(self._numbers)
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def end(self, request: Request) -> None:
        """It wants nothing more: finished, or cancelled. Its row and pages are free for the next plan."""
        if request.ended:
            return
        request.ended = True
        if request.device is None:
            self.waiting = [r for r in self.waiting if r is not request]
        else:
            self._leave(request)

    def took(self, steps: int, seconds: float, max_wait_s: float) -> None:
        """Steps took so long: of a plan they shall take half of what a request may wait, as the other half is
        on its way. At most twice as many as before."""
        most = int(steps * max_wait_s / 2 / max(seconds, 1e-6))
        self.unhurried = max(1, min(most, 2 * self.unhurried, self.limits.steps))

    def plan(self) -> Plan | None:
        """What to do next, which counts as dispatched; None: nothing can be done before results are known."""
        for device in self.devices:
            for request in device.running:
                if request.row is not None and request.read == request.to_read and request.left <= 0:
                    device.free_rows.append(request.row)  # what it drew is on its way
                    request.row = None
        self._admit()
        reads, shape = self._reads()
        writes, steps = self._writes()
        rows = self._rows(max(map(len, writes)))
        return Plan(reads, shape, writes, rows, steps) if any(reads) or rows else None

    # Rows and pages.

    def _admit(self) -> None:
        skipped = []
        while self.waiting:
            places = [device for device in self.devices if device.free_rows]
            if not places:
                break
            request = self.waiting.pop(0)
            if request.flights:  # what a pre-empted one said must be known first
                skipped.append(request)
                continue
            tokens = _tokens(request)
            most = max(0, len(tokens) - 1)  # the last is read: what it predicts is drawn
            most = most if request.reusable is None else min(most, request.reusable)
            best: tuple[Device, Match] | None = None
            for place in places:
                known = place.prefix.match(tokens, most)
                if known is None:  # another row computes its beginning
                    best = None
                    break
                if best is None or _worth(place, known) > _worth(*best):
                    best = place, known
            if best is None:
                skipped.append(request)
                continue
            device, match = best
            full = dataclasses.replace(  # without a page to copy
                match, tokens=len(match.pages) * self.limits.page_size, source=None
            )
            if not any(self._start(request, device, m, tokens) for m in (match, full)):
                skipped.append(request)
                break  # who came later does not overtake
        self.waiting[:0] = skipped

    def _start(self, request: Request, device: Device, match: Match, tokens: list[int]) -> bool:
        """Give it a row and pages, if there are enough."""
        pages, total = device.pages, len(request.prompt) + len(request.said)
        whole = request.max_new_tokens - len(request.said) if self.limits.reserve else 1
        shared = [*match.pages, *([] if match.source is None else [match.source])]
        for page in shared:
            pages.hold(page)
        need = self._pages(total + whole - 1) - len(match.pages)
        # A page for each that needs more, lest it be pre-empted at once.
        growth = sum(self._pages(len(r.prompt) + r.max_new_tokens - 1) > len(r.table) for r in device.running)
        if pages.available < need + growth:
            for page in reversed(shared):
                pages.release(page, keep=True)
            return False
        request.table = [*match.pages, *pages.take(need)]
        request.copy = None if match.source is None else (match.source, request.table[len(match.pages)])
        request.read, request.to_read, request.started = match.tokens, total, False
        if device.prefix.checkpoints is not None and tokens:
            request.checkpoint, request.cuts = match.checkpoint, (match.known, self._whole(total - 1))
            if match.checkpoint is not None:
                device.prefix.checkpoints.hold(match.checkpoint)
        request.device, request.row = self.devices.index(device), device.free_rows.pop()
        bisect.insort(device.running, request, key=lambda r: r.order)
        device.prefix.insert(tokens[: self._whole(len(tokens))], request.table, ready=False)
        return True

    def _leave(self, request: Request) -> None:
        """Take back row and pages."""
        device = self.devices[request.device]  # pyrefly: ignore[bad-index]
        device.running.remove(request)
        if request.copy is not None:
            device.pages.release(request.copy[0], keep=True)
        if request.checkpoint is not None:
            device.prefix.let_go(request.checkpoint)
        device.prefix.abandon(request.table)
        if request.read == request.to_read:  # the newest token is stored when the next is drawn
            device.prefix.insert(_tokens(request)[:-1], request.table, ready=True)
        device.prefix.release(request.table)
        if request.row is not None:
            device.free_rows.append(request.row)
        request.device = request.row = request.copy = request.checkpoint = None
        request.table = []

    def _preempt(self, request: Request) -> None:
        """Its pages go to others; it waits, and reads what it has said like a prompt."""
        self.preempted += 1
        self._leave(request)
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)

    def _whole(self, tokens: int) -> int:
        """Tokens of the full pages among so many."""
        return tokens // self.limits.page_size * self.limits.page_size

    # Work.

    def _reads(self) -> tuple[list[list[Read]], tuple[int, int]]:
        """Chunks of prompts in the shape of which the least is padding, those that came first among them."""
        unread = [[r for r in d.running if r.row is not None and r.read < r.to_read] for d in self.devices]
        first = min((r for of in unread for r in of), key=lambda r: r.order, default=None)
        if first is None:
            return [[] for _ in unread], (0, 0)
        able = [[r for r in of if _reads_vectors(r) == _reads_vectors(first)] for of in unread]

        def worth(shape: tuple[int, int]) -> tuple[float, int]:
            rows, tokens = shape
            useful = sum(min(_unread(r), tokens) for of in able for r in of[:rows])
            return useful / (rows * tokens + self.limits.prefill_cost), useful

        shape = max(self.limits.shapes, key=worth)
        if shape not in self.compiled:  # few programs: of each length one, for as many rows as it can have
            widest = {tokens: rows for rows, tokens in sorted(self.limits.shapes)}
            few = [s for s in self.limits.shapes if s in self.compiled or s[0] == widest[s[1]]]
            other = max(few, key=worth)
            shape = other if worth(other)[0] > worth(shape)[0] / PADDED else shape
        self.compiled.add(shape)
        return [[self._read(r, shape[1]) for r in of[: shape[0]]] for of in able], shape

    def _read(self, request: Request, most: int) -> Read:
        device = self.devices[request.device]  # pyrefly: ignore[bad-index]
        count = min(_unread(request), most)
        if cuts := [at for at in request.cuts if request.read < at < request.read + count]:
            count = min(cuts) - request.read
        ends = request.read + count == request.to_read
        place: tuple[int, list[int]] = request.row, request.table  # pyrefly: ignore[bad-assignment]
        read = Read(request, *place, request.read, count, ends, not request.started, request.copy)
        request.read, request.started = request.read + count, True
        if request.copy is not None:  # dispatched before whatever takes the source over
            device.pages.release(request.copy[0], keep=True)
            request.copy = None
        if request.checkpoint is not None:  # the same
            read.begins, request.checkpoint = request.checkpoint, None
            device.prefix.let_go(read.begins)
        known = request.read if ends else self._whole(request.read)
        tokens = _tokens(request)[:known]
        device.prefix.insert(tokens, request.table, ready=True)
        if tokens and request.read == self._whole(request.read):
            read.saves = device.prefix.save(tokens)
        if ends:
            request.flights.append((1, 1))
        return read

    def _writes(self) -> tuple[list[list[Request]], int]:
        """Rows that write on, with pages for what they may draw, and the steps that they make.

        Of a step with hundreds of rows this is most of what the host does: a row is looked at once.
        """
        able = [
            [(r, r.left) for r in d.running if r.row is not None and r.read == r.to_read]
            for d in self.devices
        ]
        able = [[(r, left) for r, left in of if left > 0] for of in able]
        lefts = [left for of in able for _, left in of]
        if not lefts:
            return [[] for _ in able], 0
        steps = min(self._wanted(min(lefts)), max(lefts))
        both = list(zip(self.devices, able, strict=True))
        growths = [self._growths(of, steps) for of in able]
        while steps > 1 and any(_lacking(d, of) for d, of in zip(self.devices, growths, strict=True)):
            steps //= 2
            growths = [self._growths(of, steps) for of in able]
        for (device, of), growth in zip(both, growths, strict=True):
            while _lacking(device, growth):
                last = [r for r in device.running if r.row is not None][-1]
                if last is of[0][0]:
                    of.clear()  # alone with pages that are about to be given back
                else:
                    self._preempt(last)
                    of[:] = [(r, left) for r, left in of if r is not last]
                growth[:] = self._growths(of, steps)
            for (request, left), pages in zip(of, growth, strict=True):
                if pages > 0:
                    request.table += device.pages.take(pages)
                request.flights.append((min(steps, left), self._most(left, steps)))
        return [[r for r, _ in of] for of in able], steps

    def _wanted(self, least_left: int) -> int:
        """Steps until somebody who waits can be served."""
        if any(r.row is not None and r.read < r.to_read for d in self.devices for r in d.running):
            return 1
        if self.waiting:
            least, most = WAITING_STEPS
            return min(max(least, least_left), most)
        return self.unhurried

    def _most(self, left: int, steps: int) -> int:
        """Most tokens that so many steps draw."""
        return min(steps * self.limits.width, self.limits.steps, left)

    def _growths(self, able: list[tuple[Request, int]], steps: int) -> list[int]:
        """Pages that each needs in addition for so many steps; none where it is not positive."""
        size = self.limits.page_size
        return [-(-(r.stored + self._most(left, steps)) // size) - len(r.table) for r, left in able]

    def _rows(self, busiest: int) -> int:
        """Rows of the smallest executable for so many; where it is not compiled, the largest."""
        if not busiest:
            return 0
        sizes = [n for n in self.limits.row_sizes if n >= busiest and n in self.compiled]
        rows = min(sizes, default=self.limits.max_rows)
        self.compiled.add(rows)
        return rows


def _lacking(device: Device, growth: list[int]) -> bool:
    return sum(pages for pages in growth if pages > 0) > device.pages.available


def _worth(device: Device, match: Match) -> tuple[int, int]:
    return match.tokens, device.pages.available


def _tokens(request: Request) -> list[int]:
    """What its pages hold or will, as far as pages are known by it."""
    shared = request.reusable != 0 and not request.vectors
    return [*request.prompt, *request.said] if shared else []


def _reads_vectors(request: Request) -> bool:
    return request.vectors and request.read < len(request.prompt)


def _unread(request: Request) -> int:
    """Tokens, or vectors, that the next chunk can read."""
    return (len(request.prompt) if _reads_vectors(request) else request.to_read) - request.read
