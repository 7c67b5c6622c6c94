"""Which pages of the cache are whose: counts of holders, no tensors."""

from collections import OrderedDict
from collections.abc import Callable


class Pages:
    """Pages 0 to count - 1, each with any number of holders.

    A page without a holder is free, or idle: its keys and values may serve again (prefix.py). Idle pages are
    taken when no free one is left, the one that has been idle longest first.

    taken_over   called with an idle page that is about to be written over
    """

    def __init__(self, count: int, taken_over: Callable[[int], None] = lambda page: None):
        self.count, self.taken_over = count, taken_over
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
        """n pages, each with one holder. Ask `available` first."""
        taken = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self.taken_over(page)
            self.holders[page] = 1
            taken.append(page)
        return taken

    def hold(self, page: int) -> None:
        """One more holder of a page that is held or idle."""
        if not self.holders[page]:
            del self._idle[page]
        self.holders[page] += 1

    def release(self, page: int, *, keep: bool) -> None:
        """One holder less; behind the last one the page is idle if it is to be kept, else free."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        if keep:
            self._idle[page] = None
        else:
            self._free.append(page)
