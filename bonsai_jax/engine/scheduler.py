"""Who runs next: requests, rows and pages of each device, as plain Python without tensors.

    waiting --admit--> reading (prefill, in chunks) --its last chunk draws--> writing (decode) --> ended
       ^                                                                         |
       `--------------------- pre-empted: another request needs its pages -------'

The host makes a plan before it knows the results of the plan before. So it knows only bounds for a request:
the `least` and `most` tokens that dispatched work will have drawn. Rows and pages can be given to another
request as soon as they are released, because the device runs one plan after another.

While any request has a constraint, steps of all are split (split_rows.py): a plan draws for the requests
whose masks are ready, then reads what they drew. With a mailbox it draws for all, and whether a request does
take a token is settled later, by a letter (Request.hold). In an engine that speculates, requests without a
constraint take whole steps beside them.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable

from bonsai_jax.engine import checkpoints
from bonsai_jax.engine.plans import Limits, Plan, Read, Request, Save
from bonsai_jax.engine.prefix import Match, PrefixCache

PADDED = 2.8  # times the cost of the best shape, per token read, is paid rather than compile that shape
# The fewest forced tokens that are read in one chunk. There must also be as many as rows that decode: a chunk
# takes about as long as a step of all rows, and saves one step of one row for each token.
FORCED_CHUNK = 4
WAITING_STEPS = (4, 16)  # decode steps of a plan while requests wait for a row: at least, and at most


class Device:
    """Rows and pages of one device (one part of the mesh's axis "data")."""

    def __init__(self, limits: Limits):
        self.prefix = PrefixCache(limits.pages, limits.page_size, limits.checkpoints)
        self.pages = self.prefix.pages
        self.free_rows = list(reversed(range(limits.max_batch_size)))
        self.running: list[Request] = []  # by priority, then arrival


class Scheduler:
    """Requests in, plans out.

    idle_steps   decode steps of a plan when no prompt is pending and no request waits for a row
    reads_first  whether no request decodes while the prompts of others that have a row are read, for callers
                 that wait for all answers: a step takes as long for a few of a program's rows as for all of
                 them. Else each plan that reads has a step, so that no answer waits for another's prompt
    compiled     members of limits.row_sizes and limits.shapes that have been used
    compiled_split   those that have been used in split plans
    compiled_chained   those of plans with a chain of samplers, split or not
    constrained  how many requests have a constraint
    chained      how many use a sampler of decoding/chain.py
    saves        copies of states to dispatch before the next plan, in this order
    preempted    how often a request has lost its pages
    stand_in     StandIns.best, if programs may stand in for others
    """

    def __init__(self, limits: Limits, devices: int = 1):
        self.limits, self.devices = limits, [Device(limits) for _ in range(devices)]
        self.waiting: list[Request] = []  # by priority, then arrival
        self.idle_steps = limits.steps
        self.reads_first = False
        self.compiled: set[int | tuple[int, int]] = set()
        self.compiled_split: set[int | tuple[int, int]] = set()
        self.compiled_chained: dict[bool, set[int | tuple[int, int]]] = {False: set(), True: set()}
        self.constrained = self.chained = self.preempted = 0
        self.saves: list[Save] = []
        self.stand_in: Callable[..., tuple[int, int] | None] | None = None
        self._split = False  # the last plan
        self._chain = False  # the plan that is being made
        self._numbers = itertools.count()

    def take_turns(self, rows: int) -> None:
        """Run at most this many requests at a time on each device. Call it before the first plan."""
        for device in self.devices:
            del device.free_rows[:-rows]

    def add(self, request: Request) -> None:
        request.number = next(self._numbers)
        self.constrained += request.constrained
        self.chained += request.chained
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def end(self, request: Request, *, read: int | None = None) -> None:
        """The request is complete or cancelled. Its row and pages are free for the next plan.

        read   tokens of its prompt and answer that its row has read, and no more; None: nobody knows
        """
        if request.ended:
            return
        request.ended = True
        self.constrained -= request.constrained
        self.chained -= request.chained
        if request.device is None:
            at = bisect.bisect_left(self.waiting, request.order, key=lambda r: r.order)
            if self.waiting[at : at + 1] == [request]:
                del self.waiting[at]
        else:
            self._release(request, read)

    def measured(self, steps: int, seconds: float, max_wait_s: float) -> None:
        """So many steps took so long. Set idle_steps to what fits in half of max_wait_s, because a new
        request may also wait for the plan before. It grows to twice its value at most."""
        fitting = int(steps * max_wait_s / 2 / max(seconds, 1e-6))
        self.idle_steps = max(1, min(fitting, 2 * self.idle_steps, self.limits.steps))

    def plan(self) -> Plan | None:
        """The next plan, which counts as dispatched; None: nothing can be done before results are known."""
        for device in self.devices:
            for request in device.running:
                if request.row is not None and request.read == request.to_read and request.left <= 0:
                    self._save_last(device, request)  # all its draws are dispatched
                    device.free_rows.append(request.row)
                    request.row = None
        self._admit()
        split, was_split = self.constrained > 0, self._split
        self._split = split
        self._chain = bool(self.chained) and any(r.chained for d in self.devices for r in d.running)
        reads, shape = self._reads()
        draws = self._draws() if split or was_split else [[] for _ in self.devices]
        writes, steps = ([[] for _ in reads], 0) if self._reads_on(reads) else self._writes()
        guesses: list[list[Request]] = [[] for _ in writes]
        if split and self.limits.width > 1:
            guesses = [[r for r in requests if not r.constrained] for requests in writes]
            writes = [[r for r in requests if r.constrained] for requests in writes]
        rows = self._decode_rows(max(map(len, [*draws, *writes])), self._compiled)
        guess_rows = self._decode_rows(max(map(len, guesses)), self.compiled)
        if not (any(reads) or rows or guess_rows):
            return None
        return Plan(reads, shape, writes, rows, steps, draws, split, self._chain, guesses, guess_rows)

    def renew(self, restart: bool) -> None:
        """Plans from now on run with other weights: nothing that is cached begins a later prompt.

        restart   running requests release their pages, and later read their prompts and answers again; else
                  they go on with the pages that they have, which nobody shares
        """
        for device in self.devices:
            if restart:
                unfinished = [r for r in device.running if r.row is not None and _unfinished(r)]
                for request in unfinished:
                    self._wait_again(request)
            for request in device.running:
                request.outdated = True
            device.prefix.clear()

    def force(self, request: Request, tokens: list[int]) -> bool:
        """Have a request say these tokens, and read them in one chunk, in place of drawing them. No draw of
        it may be under way, but one that waits for its mask, which then takes no token. False: it must draw
        them, because that is faster or there are too few pages."""
        if request.device is not None:
            rows = max(len(device.running) for device in self.devices)
            # A chunk rounds otherwise than steps, so in a reproducible engine a crowd must not decide on it.
            if self.limits.reserve or len(tokens) < max(FORCED_CHUNK, rows):
                return False
            pages = self.devices[request.device].pages
            new = self._pages(len(request.prompt) + len(request.said) + len(tokens)) - len(request.table)
            if new > pages.available:
                return False
            request.hold()
            if request.read == request.to_read:
                request.read = request.stored
            request.table += pages.take(max(0, new))
            request.to_read = len(request.prompt) + len(request.said) + len(tokens)
            request.undrawn = request.guessed = False
        request.said += tokens
        return True

    # Rows and pages.

    def _admit(self) -> None:
        """Give waiting requests a row and pages, in order."""
        skipped = []
        while self.waiting:
            places = [device for device in self.devices if device.free_rows]
            if not places:
                break
            request = self.waiting.pop(0)
            if request.flights:  # pre-empted: the tokens that it has drawn are not known yet
                skipped.append(request)
                continue
            tokens = _tokens(request)
            most = max(0, len(tokens) - 1)  # the last token is always read, to draw the next
            most = most if request.reusable is None else min(most, request.reusable)
            best: tuple[Device, Match] | None = None
            for place in places:
                known = place.prefix.match(tokens, most, request.owner)
                if known is None:  # another row is computing more of its beginning: wait for it
                    best = None
                    break
                if best is None or _preference(place, known) > _preference(*best):
                    best = place, known
            if best is None:
                skipped.append(request)
                continue
            device, match = best
            if match.source is None or match.checkpoint is None:
                full_pages = dataclasses.replace(  # without the copy of a page that agrees in part
                    match, tokens=len(match.pages) * self.limits.page_size, source=None
                )
            else:
                full_pages = Match([], 0, known=match.known)
            if not any(self._start(request, device, m, tokens) for m in (match, full_pages)):
                skipped.append(request)
                break  # later requests do not overtake one that needs pages
        self.waiting[:0] = skipped

    def _start(self, request: Request, device: Device, match: Match, tokens: list[int]) -> bool:
        """Give the request a row and pages, if there are enough pages."""
        pages, total = device.pages, len(request.prompt) + len(request.said)
        new = request.max_new_tokens - len(request.said) if self.limits.reserve else 1
        shared = [*match.pages, *([] if match.source is None else [match.source])]
        for page in shared:
            pages.hold(page)
        need = self._pages(total + new - 1) - len(match.pages)
        # Leave a page for each running request that needs more; else one would be pre-empted at once.
        plenty = pages.available >= need + len(device.running)  # `_growing` looks at all of them
        if not plenty and pages.available < need + self._growing(device):
            for page in reversed(shared):
                pages.release(page, keep=True)
            return False
        request.table = [*match.pages, *pages.take(need)]
        request.copy = None if match.source is None else (match.source, request.table[len(match.pages)])
        request.read, request.to_read, request.started = match.tokens, total, False
        if device.prefix.checkpoints is not None and tokens:
            request.checkpoint, request.saved_at = match.checkpoint, match.tokens
            request.cuts = checkpoints.cuts(match, total, request.places, self.limits.page_size)
            if match.checkpoint is not None:
                device.prefix.checkpoints.hold(match.checkpoint)
            for place in request.places or ():  # the next turn may need it, so it stays
                if place in match.states:
                    device.prefix.checkpoints.touch(match.states[place])
        request.device, request.row = self.devices.index(device), device.free_rows.pop()
        bisect.insort(device.running, request, key=lambda r: r.order)
        whole = tokens[: self._page_floor(len(tokens))]
        device.prefix.insert(whole, request.table, ready=False, owner=request.owner)
        return True

    def _growing(self, device: Device) -> int:
        """How many running requests need more pages than they have."""
        return sum(self._pages(len(r.prompt) + r.max_new_tokens - 1) > len(r.table) for r in device.running)

    def _release(self, request: Request, read: int | None = None) -> None:
        """Take row and pages from a running request. read: as for `end`."""
        device = self.devices[request.device]  # pyrefly: ignore[bad-index]
        device.running.remove(request)
        if request.copy is not None:
            device.pages.release(request.copy[0], keep=True)
        if request.checkpoint is not None:
            device.prefix.release_checkpoint(request.checkpoint)
        device.prefix.abandon(request.table)
        if request.read == request.to_read:
            tokens = request.cached(read) if _shared(request) else []
            device.prefix.insert(tokens, request.table, ready=True, owner=request.owner)
            if read is not None and not device.prefix.has_state(tokens, request.table, request.owner):
                self._save_last(device, request)
                if request.last_state is not None:
                    device.prefix.attach(request.last_state, tokens, request.table, request.owner)
                    request.last_state = None
        if request.last_state is not None:
            device.prefix.release_checkpoint(request.last_state)
        device.prefix.release(request.table)
        if request.row is not None:
            device.free_rows.append(request.row)
        request.device = request.row = request.copy = request.checkpoint = request.last_state = None
        request.table, request.undrawn, request.guessed, request.outdated = [], False, False, False

    def _save_last(self, device: Device, request: Request) -> None:
        """Save the state of the request's row, after all its draws, before another gets the row."""
        if request.row is None or request.last_state is not None or not _shared(request):
            return
        if (checkpoint := device.prefix.checkpoint()) is not None:
            self.saves.append(Save(self.devices.index(device), request.row, checkpoint))
            request.last_state = checkpoint

    def _preempt(self, request: Request) -> None:
        """Take its pages for others. It waits, and later reads its prompt and answer like a prompt."""
        self.preempted += 1
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        self._release(request)
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)

    def _page_floor(self, tokens: int) -> int:
        """Of this many tokens, those that fill whole pages."""
        return tokens // self.limits.page_size * self.limits.page_size

    # Work.

    def _reads(self) -> tuple[list[list[Read]], tuple[int, int]]:
        """The next chunks of prompts for each device, oldest requests first, in the shape with the least
        padding."""
        pending = [[r for r in d.running if r.row is not None and r.read < r.to_read] for d in self.devices]
        first = min(itertools.chain(*pending), key=lambda r: r.order, default=None)
        if first is None:
            return [[] for _ in pending], (0, 0)
        alike = [[r for r in requests if _reads_vectors(r) == _reads_vectors(first)] for requests in pending]

        def worth(shape: tuple[int, int]) -> tuple[float, int]:
            rows, tokens = shape
            useful = sum(min(_unread(r), tokens) for requests in alike for r in requests[:rows])
            return useful / (rows * tokens + self.limits.prefill_cost), useful

        shape, compiled = max(self.limits.shapes, key=worth), self._compiled
        if shape not in compiled:
            shape = self._stand_in(shape, worth) or self._to_compile(shape, worth)
        compiled.add(shape)
        return [[self._read(r, shape[1]) for r in requests[: shape[0]]] for requests in alike], shape

    def _stand_in(self, shape: tuple[int, int], worth: Callable) -> tuple[int, int] | None:
        """The shape to read with: this one if its program is there or should be compiled by now, or another
        that stands in for it. None: no program is there."""
        if self.stand_in is None:
            return None
        useful = worth(shape)[1]
        cost = lambda other: useful / worth(other)[0] / self.limits.prefill_cost  # noqa: E731
        return self.stand_in(shape, self.limits.shapes, cost)

    def _to_compile(self, shape: tuple[int, int], worth: Callable) -> tuple[int, int]:
        """Compile few: for each length only the shape with the most rows."""
        widest = {tokens: rows for rows, tokens in sorted(self.limits.shapes)}
        few = [s for s in self.limits.shapes if s in self._compiled or s[0] == widest[s[1]]]
        other = max(few, key=worth)
        return other if worth(other)[0] > worth(shape)[0] / PADDED else shape

    def _read(self, request: Request, most: int) -> Read:
        """The request's next chunk, of at most this many tokens."""
        device = self.devices[request.device]  # pyrefly: ignore[bad-index]
        count = min(_unread(request), most)
        if later := [at for at in request.cuts if request.read < at < request.read + count]:
            count = later[0] - request.read
        ends = request.read + count == request.to_read
        place: tuple[int, list[int]] = request.row, request.table  # pyrefly: ignore[bad-assignment]
        read = Read(request, *place, request.read, count, ends, not request.started, request.copy)
        request.read, request.started = request.read + count, True
        if request.copy is not None:  # the copy is dispatched before anything can overwrite its source
            device.pages.release(request.copy[0], keep=True)
            request.copy = None
        if request.checkpoint is not None:  # likewise
            read.begins, request.checkpoint = request.checkpoint, None
            device.prefix.release_checkpoint(read.begins)
        cut = request.read in request.cuts
        known = request.read if ends or cut else self._page_floor(request.read)
        tokens = _tokens(request)[:known]
        device.prefix.insert(tokens, request.table, ready=True, owner=request.owner)
        page_size = self.limits.page_size
        if cut or (not ends and checkpoints.passing(request.read, request.saved_at, page_size)):
            read.saves = device.prefix.save(tokens, request.table, request.owner, passing=not cut)
            request.saved_at = request.read
        if ends and self.constrained:
            request.undrawn = True
        elif ends:
            request.flights.append((1, 1))
        return read

    @property
    def _is_reading(self) -> bool:
        """Whether a request that has a row is not read to its end."""
        return any(r.row is not None and r.read < r.to_read for d in self.devices for r in d.running)

    def _reads_on(self, reads: list[list[Read]]) -> bool:
        """Whether steps wait because the next plan reads, too: the rest of a prompt, or one whose beginning
        is being read for another."""
        may_start = any(reads) and bool(self.waiting) and any(device.free_rows for device in self.devices)
        return self.reads_first and (self._is_reading or may_start)

    def _draws(self) -> list[list[tuple[Request, int]]]:
        """The requests of each device that draw what they have read for, and their rows: those whose masks
        are ready, or all with a mailbox."""
        mailbox = self.limits.mailbox
        draws = [
            [
                (r, r.row)
                for r in d.running
                if r.row is not None and r.undrawn and (r.ready or (mailbox and not r.complete))
            ]
            for d in self.devices
        ]
        for request, _ in itertools.chain(*draws):
            request.verifies, request.guessed = request.guessed, False
            most = min(self.limits.guess_width, request.left) if request.verifies else 1
            request.flights.append((1, most))
            request.undrawn = False
            if not mailbox:
                request.ready = not request.constrained
        return draws

    def _writes(self) -> tuple[list[list[Request]], int]:
        """The requests of each device that decode, with pages for the tokens that they may draw, and the
        number of steps.

        With hundreds of rows this is most of the host's work, so it looks at each row once.
        """
        writers = [
            [(r, r.left) for r in d.running if r.row is not None and r.read == r.to_read and not r.undrawn]
            for d in self.devices
        ]
        writers = [[(r, left) for r, left in pairs if left > 0] for pairs in writers]
        lefts = [left for pairs in writers for _, left in pairs]
        if not lefts:
            return [[] for _ in writers], 0
        steps = min(self._step_limit(min(lefts)), max(lefts))
        growths = [self._growths(pairs, steps) for pairs in writers]
        while steps > 1 and any(map(_short_of_pages, self.devices, growths)):
            steps //= 2
            growths = [self._growths(pairs, steps) for pairs in writers]
        for device, pairs, growth in zip(self.devices, writers, growths, strict=True):
            while _short_of_pages(device, growth):
                last = [r for r in device.running if r.row is not None][-1]
                if last is pairs[0][0]:
                    pairs.clear()  # it is alone, and ended requests will release their pages
                else:
                    self._preempt(last)
                    pairs[:] = [(r, left) for r, left in pairs if r is not last]
                growth[:] = self._growths(pairs, steps)
            for (request, left), pages in zip(pairs, growth, strict=True):
                if pages > 0:
                    request.table += device.pages.take(pages)
                if self.constrained and (request.constrained or self.limits.width == 1):
                    request.undrawn, request.guessed = True, self.limits.guess_width > 1
                else:
                    request.flights.append((min(steps, left), self._most(request, left, steps)))
        return [[r for r, _ in pairs] for pairs in writers], steps

    def _step_limit(self, least_left: int) -> int:
        """Most decode steps of the next plan: 1 while prompts are pending or steps are split; while requests
        wait for a row, about as many as the row nearest to its end has left; else idle_steps."""
        if self.constrained:
            return 1
        if self._is_reading:
            return 1
        if self.waiting:
            least, most = WAITING_STEPS
            return min(max(least, least_left), most)
        return self.idle_steps

    def _most(self, request: Request, left: int, steps: int) -> int:
        """Most tokens that a row can draw in this many steps."""
        width = self.limits.guess_width if request.constrained else self.limits.width
        return min(steps * width, self.limits.steps, left)

    def _growths(self, pairs: list[tuple[Request, int]], steps: int) -> list[int]:
        """Pages that each request needs in addition for this many steps; 0 or less where it needs none."""
        size = self.limits.page_size
        return [-(-(r.stored + self._most(r, left, steps)) // size) - len(r.table) for r, left in pairs]

    def _decode_rows(self, busiest: int, compiled: set[int | tuple[int, int]]) -> int:
        """Rows of the smallest compiled program that has room for this many; else of the largest program."""
        if not busiest:
            return 0
        sizes = [n for n in self.limits.row_sizes if n >= busiest and n in compiled]
        rows = min(sizes, default=self.limits.max_batch_size)
        compiled.add(rows)
        return rows

    @property
    def _compiled(self) -> set[int | tuple[int, int]]:
        if self._chain:
            return self.compiled_chained[self.constrained > 0]
        return self.compiled_split if self.constrained else self.compiled


def _short_of_pages(device: Device, growth: list[int]) -> bool:
    return sum(pages for pages in growth if pages > 0) > device.pages.available


def _preference(device: Device, match: Match) -> tuple[int, int]:
    """The device that knows more of the prompt is better, then the one with more pages."""
    return match.tokens, device.pages.available


def _tokens(request: Request) -> list[int]:
    """The tokens by which its pages can be found; [] where they are not to be shared."""
    return [*request.prompt, *request.said] if _shared(request) else []


def _shared(request: Request) -> bool:
    return request.reusable != 0 and not request.vectors and not request.outdated


def _unfinished(request: Request) -> bool:
    """Whether work for it is left to be dispatched."""
    return request.read < request.to_read or request.left > 0


def _reads_vectors(request: Request) -> bool:
    return request.vectors and request.read < len(request.prompt)


def _unread(request: Request) -> int:
    """Tokens, or vectors, that the next chunk can read."""
    return (len(request.prompt) if _reads_vectors(request) else request.to_read) - request.read
