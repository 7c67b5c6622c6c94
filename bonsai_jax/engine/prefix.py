"""Which pages hold which tokens: a tree of pages, so that a prompt's beginning is computed once.

    root -- "You are a helpful" -- "assistant. What is" -- "a bonsai?"       each node: the tokens of a page
                               `-- "assistant. Name a"

A node is found by its parent and its tokens, which a dict hashes and then compares: the chain of hashes that
other engines keep, without their collisions. A full page is shared as it is. Of a page that agrees in part a
copy is made, which its new owner writes behind the part (copy-on-write): what is shared is never written.

A model that keeps more than pages for a row (a recurrent state) can go on only from where that was saved too,
in a checkpoint behind a full page. `match` then ends at a node that has one. There are few, as a state may be
as large as many pages; the one that has served longest ago gives way.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from bonsai_jax.engine.pages import Pages

SIBLINGS = 64  # pages that are looked through for one to copy, the newest first


@dataclasses.dataclass(eq=False)
class Node:
    """tokens   of the page, at most page_size; only full pages have children
    ready       its keys and values are computed, or will be by work that is dispatched already
    checkpoint  where the state behind its last token is; None: nowhere"""

    tokens: tuple[int, ...]
    page: int
    parent: "Node | None"
    ready: bool
    checkpoint: int | None = None
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Match:
    """The beginning of a prompt that is there.

    pages   full ones, to be shared
    tokens  how many tokens are there in all
    source  a page to copy, which agrees in part; None: there is none
    checkpoint  of the state behind them, for models that have one
    known   tokens of all full pages that are there, whether there is a checkpoint behind them or not
    """

    pages: list[int]
    tokens: int
    source: int | None = None
    checkpoint: int | None = None
    known: int = 0


class PrefixCache:
    """Of one device's `Pages`, whose idle pages it can name.

    checkpoints   room for so many; None: the model keeps nothing but pages
    """

    def __init__(self, count: int, page_size: int, checkpoints: int | None = None):
        self.page_size = page_size
        self.checkpoints = None if checkpoints is None else Pages(checkpoints, self._overwritten)
        self._saved: dict[int, Node] = {}
        self.pages = Pages(count, self._forget)
        self._root = Node((), -1, None, True)
        self._nodes: dict[int, Node] = {}

    def match(self, tokens: list[int], most: int) -> Match | None:
        """The longest known beginning of `tokens`, at most `most` of them. None while a row computes more of
        it: wait, and the page need not be computed twice. Nothing is held by it."""
        if self.checkpoints is not None:
            return self._match_saved(tokens, most)
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

    def _match_saved(self, tokens: list[int], most: int) -> Match | None:
        node, pages, found = self._root, [], Match([], 0)
        for chunk in self._chunks(tokens[: most // self.page_size * self.page_size]):
            node = node.children.get(chunk)
            if node is None:
                break
            if not node.ready:
                return None
            pages.append(node.page)
            found.known += len(chunk)
            if node.checkpoint is not None:
                found = Match(list(pages), found.known, None, node.checkpoint, found.known)
        return found

    def save(self, tokens: list[int]) -> int | None:
        """Where to keep the state behind these tokens, of full pages that are known; None: it is kept, or
        there is no room. What is there now may be written over by work that is dispatched later."""
        node: Node | None = self._root
        for chunk in self._chunks(tokens):
            node = node.children.get(chunk) if node is not None else None
        if self.checkpoints is None or node is None or node is self._root:
            return None
        if node.checkpoint is not None or not self.checkpoints.available:
            return None
        (node.checkpoint,) = self.checkpoints.take(1)
        self._saved[node.checkpoint] = node
        self.checkpoints.release(node.checkpoint, keep=True)
        return node.checkpoint

    def _overwritten(self, checkpoint: int) -> None:
        self._saved.pop(checkpoint).checkpoint = None

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
        if self.checkpoints is not None and node.checkpoint is not None:
            self.checkpoints.hold(node.checkpoint)  # if somebody holds it, it is free behind them
            del self._saved[node.checkpoint]
            self.let_go(node.checkpoint)
        for child in list(node.children.values()):
            self._forget(child.page)

    def let_go(self, checkpoint: int) -> None:
        """One holder of a checkpoint less."""
        if self.checkpoints is not None:
            self.checkpoints.release(checkpoint, keep=checkpoint in self._saved)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens in which two beginnings agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
