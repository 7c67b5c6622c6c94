"""Which pages hold which tokens: a tree of pages, so that a prompt's beginning is computed once.

    root -- "You are a helpful" -- "assistant. What is" -- "a bonsai?"       each node: the tokens of a page
                               `-- "assistant. Name a"

A node is found by its parent and its tokens, which a dict hashes and then compares: the chain of hashes that
other engines keep, without their collisions. A full page is shared as it is. Of a page that agrees in part a
copy is made, which its new owner writes behind the part (copy-on-write): what is shared is never written.

A model that keeps more than pages for a row (a recurrent state) can go on only from where that was saved too:
a node is the place for such a checkpoint, and `match` must then end at a node that has one.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from bonsai_jax.engine.pages import Pages

SIBLINGS = 64  # pages that are looked through for one to copy, the newest first


@dataclasses.dataclass(eq=False)
class Node:
    """tokens   of the page, at most page_size; only full pages have children
    ready       its keys and values are computed, or will be by work that is dispatched already"""

    tokens: tuple[int, ...]
    page: int
    parent: "Node | None"
    ready: bool
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Match:
    """The beginning of a prompt that is there.

    pages   full ones, to be shared
    tokens  how many tokens are there in all
    source  a page to copy, which agrees in part; None: there is none
    """

    pages: list[int]
    tokens: int
    source: int | None = None


class PrefixCache:
    """Of one device's `Pages`, whose idle pages it can name."""

    def __init__(self, count: int, page_size: int):
        self.page_size = page_size
        self.pages = Pages(count, self._forget)
        self._root = Node((), -1, None, True)
        self._nodes: dict[int, Node] = {}

    def match(self, tokens: list[int], most: int) -> Match | None:
        """The longest known beginning of `tokens`, at most `most` of them. None while a row computes more of
        it: wait, and the page need not be computed twice. Nothing is held by it."""
        node, found = self._root, Match([], 0)
        for chunk in self._chunks(tokens[:most]):
            child = node.children.get(chunk) if len(chunk) == self.page_size else None
            if child is None:
                newest = itertools.islice(reversed(node.children.values()), SIBLINGS)
                best = max(newest, key=lambda c: _common(c.tokens, chunk), default=None)
                if best is not None and best.ready and (part := _common(best.tokens, chunk)):
                    found = Match(found.pages, found.tokens + part, best.page)
                return found
            if not child.ready:
                return None
            node, found = child, Match([*found.pages, child.page], found.tokens + len(chunk))
        return found

    def insert(self, tokens: list[int], table: list[int], *, ready: bool) -> None:
        """Pages of a row, table[i] with tokens [i * page_size, (i + 1) * page_size), will be found from now
        on. A page whose tokens another one has already stays unknown."""
        node = self._root
        for chunk, page in zip(self._chunks(tokens), table, strict=False):
            child = node.children.get(chunk)
            if child is None:
                if len(chunk) < self.page_size and not ready:
                    return  # its owner has not even read it
                self._forget(page)  # it was known by fewer tokens
                child = self._nodes[page] = node.children[chunk] = Node(chunk, page, node, ready)
            elif child.page == page:
                child.ready |= ready
            node = child

    def abandon(self, table: Iterable[int]) -> None:
        """The owner of these pages gives up: forget those that it has not computed."""
        for page in table:
            if page in self._nodes and not self._nodes[page].ready:
                self._forget(page)

    def release(self, table: Iterable[int]) -> None:
        """One holder less for each page of a row. The last pages are idle the longest: a page goes before
        those that it stands behind."""
        for page in reversed(list(table)):
            self.pages.release(page, keep=page in self._nodes)

    def _chunks(self, tokens: list[int]) -> Iterator[tuple[int, ...]]:
        for first in range(0, len(tokens), self.page_size):
            yield tuple(tokens[first : first + self.page_size])

    def _forget(self, page: int) -> None:
        """A page, and all behind it, which nobody could find any more."""
        node = self._nodes.pop(page, None)
        if node is None:
            return
        if node.parent is not None:
            del node.parent.children[node.tokens]
        for child in list(node.children.values()):
            self._forget(child.page)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens in which two beginnings agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
