"""Which pages of the cache are in use: reference counts, no tensors."""

from collections import OrderedDict
from collections.abc import Callable


class Pages:
    """Pages 0 to count - 1, each with a number of holders.

    A page without a holder is free, or idle: a later prompt may use its keys and values again (prefix.py).
    When no page is free, idle ones are taken, the one that has been idle longest first.

    on_overwrite   called with an idle page that is taken
    """

    def __init__(self, count: int, on_overwrite: Callable[[int], None] = lambda page: None):
        self.count, self.on_overwrite = count, on_overwrite
        self.holders = [0] * count
        self._free = list(reversed(range(count)))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def take(self, n: int) -> list[int]:
        """n pages, each with one holder. n must not exceed `available`."""
        taken = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self.on_overwrite(page)
            self.holders[page] = 1
            taken.append(page)
        return taken

    def hold(self, page: int) -> None:
        """Add a holder to a page that has one or is idle."""
        if not self.holders[page]:
            del self._idle[page]
        self.holders[page] += 1

    def free_idle(self) -> None:
        """No later prompt may use what idle pages hold: they are free."""
        self._free += reversed(self._idle)
        self._idle.clear()

    def release(self, page: int, *, keep: bool, first: bool = False) -> None:
        """Remove a holder. Without any the page is idle if `keep`, else free. first: it is the next idle page
        to be taken."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        if keep:
            self._idle[page] = None
            self._idle.move_to_end(page, last=not first)
        else:
            self._free.append(page)

    def is_free(self, page: int) -> bool:
        """Whether it holds nothing."""
        return not self.holders[page] and page not in self._idle

    def touch(self, page: int) -> None:
        """An idle page is taken last, as if it had been released now."""
        if page in self._idle:
            self._idle.move_to_end(page)
