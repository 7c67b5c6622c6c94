"""Which pages hold which tokens: a tree of pages, so that a common beginning of prompts is computed once.

    root -- "You are a helpful" -- "assistant. What is" -- "a bonsai?"       each node: the tokens of a page
                               `-- "assistant. Name a"

A node is found by its parent and its tokens, the key of a dict, which hashes and then compares them. So two
different prompts cannot collide, as they can in the chain of hashes of other engines. A full page is shared.
A page that agrees only at its beginning is copied, and the new owner writes after that beginning
(copy-on-write): a shared page is never written.

A model with a recurrent state can continue only from positions where the state was saved too, in a checkpoint
after a full page; `match` then ends at a node that has one. A state may be as large as many pages, so there
are few checkpoints, and the least recently used one is overwritten.

Each owner of requests has a root, so that nobody can tell from the time of an answer how another's prompt
begins.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from bonsai_jax.engine.pages import Pages

SIBLINGS = 64  # pages that are compared with a chunk to find one to copy, the newest first


@dataclasses.dataclass(eq=False)
class Node:
    """A page and its tokens.

    tokens      at most page_size; only full pages have children
    ready       its keys and values are computed, or dispatched work will compute them
    checkpoint  the recurrent state after its last token; None: it is not saved
    """

    tokens: tuple[int, ...]
    page: int
    parent: "Node | None"
    ready: bool
    checkpoint: int | None = None
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Match:
    """The beginning of a prompt that the cache has.

    pages   full pages, to be shared
    tokens  in these pages and the part of `source` that agrees
    source  a page to copy because it agrees at its beginning; None: none does
    checkpoint  the recurrent state after these tokens, for models that have one
    known   tokens of all full pages in the cache, also of those after the last checkpoint
    """

    pages: list[int]
    tokens: int
    source: int | None = None
    checkpoint: int | None = None
    known: int = 0


class PrefixCache:
    """One device's `Pages`, and the tokens of those in use and idle.

    checkpoints   how many recurrent states can be saved; None: the model has only pages
    """

    def __init__(self, count: int, page_size: int, checkpoints: int | None = None):
        self.page_size = page_size
        self.checkpoints = None if checkpoints is None else Pages(checkpoints, self._overwritten)
        self._saved: dict[int, Node] = {}
        self.pages = Pages(count, self._forget)
        self._roots: dict[str, Node] = {}  # by owner
        self._nodes: dict[int, Node] = {}

    def match(self, tokens: list[int], most: int, owner: str = "") -> Match | None:
        """The longest beginning of `tokens`, at most `most` of them, that the cache has for this owner. None
        while a row is computing more of it: the caller waits, so that no page is computed twice. Adds no
        holder."""
        if self.checkpoints is not None:
            return self._match_saved(tokens, most, owner)
        node, match = self._root(owner), Match([], 0)
        for chunk in self._chunks(tokens[:most]):
            child = node.children.get(chunk) if len(chunk) == self.page_size else None
            if child is None:
                newest = itertools.islice(reversed(node.children.values()), SIBLINGS)
                best = max(newest, key=lambda c: _common(c.tokens, chunk), default=None)
                if best is not None and best.ready and (part := _common(best.tokens, chunk)):
                    match = Match(match.pages, match.tokens + part, best.page)
                return match
            if not child.ready:
                return None
            node, match = child, Match([*match.pages, child.page], match.tokens + len(chunk))
        return match

    def _match_saved(self, tokens: list[int], most: int, owner: str) -> Match | None:
        node, pages, match = self._root(owner), [], Match([], 0)
        for chunk in self._chunks(tokens[: most // self.page_size * self.page_size]):
            node = node.children.get(chunk)
            if node is None:
                break
            if not node.ready:
                return None
            pages.append(node.page)
            match.known += len(chunk)
            if node.checkpoint is not None:
                match = Match(list(pages), match.known, None, node.checkpoint, match.known)
        return match

    def save(self, tokens: list[int], owner: str = "") -> int | None:
        """The checkpoint for the state after these tokens, which fill known pages; None: it is saved already,
        or every checkpoint has a holder. Only work that is dispatched later may write to it."""
        node: Node | None = self._root(owner)
        for chunk in self._chunks(tokens):
            node = node.children.get(chunk) if node is not None else None
        if self.checkpoints is None or node is None or not tokens:
            return None
        if node.checkpoint is not None or not self.checkpoints.available:
            return None
        (node.checkpoint,) = self.checkpoints.take(1)
        self._saved[node.checkpoint] = node
        self.checkpoints.release(node.checkpoint, keep=True)
        return node.checkpoint

    def _overwritten(self, checkpoint: int) -> None:
        self._saved.pop(checkpoint).checkpoint = None

    def insert(self, tokens: list[int], table: list[int], *, ready: bool, owner: str = "") -> None:
        """Add the pages of a row of this owner, table[i] with tokens [i * page_size, (i + 1) * page_size). A
        page is left out if another page has the same tokens already.

        ready   dispatched work computes them; else `match` waits for them
        """
        node = self._root(owner)
        for chunk, page in zip(self._chunks(tokens), table, strict=False):
            child = node.children.get(chunk)
            if child is None:
                if len(chunk) < self.page_size and not ready:
                    return  # only full pages can be waited for
                self._forget(page)  # the tree has it with fewer tokens
                child = self._nodes[page] = node.children[chunk] = Node(chunk, page, node, ready)
            elif child.page == page:
                child.ready |= ready
            node = child

    def clear(self) -> None:
        """Forget all tokens and checkpoints: no later prompt begins with what is stored now. Holders keep
        theirs until they release them."""
        self._roots.clear()
        self._nodes.clear()
        self._saved.clear()
        for stored in (self.pages, self.checkpoints):
            if stored is not None:
                stored.free_idle()

    def abandon(self, table: Iterable[int]) -> None:
        """The row of these pages will not compute the rest: remove the pages that are not ready."""
        for page in table:
            if page in self._nodes and not self._nodes[page].ready:
                self._forget(page)

    def release(self, table: Iterable[int]) -> None:
        """Remove a holder from each page of a row, the last page first: idle pages are overwritten in this
        order, so a page goes before its parent."""
        for page in reversed(list(table)):
            self.pages.release(page, keep=page in self._nodes)

    def _root(self, owner: str) -> Node:
        return self._roots.setdefault(owner, Node((), -1, None, True))

    def _chunks(self, tokens: list[int]) -> Iterator[tuple[int, ...]]:
        for first in range(0, len(tokens), self.page_size):
            yield tuple(tokens[first : first + self.page_size])

    def _forget(self, page: int) -> None:
        """Remove a page, and all pages below it in the tree, which could not be found any more."""
        node = self._nodes.pop(page, None)
        if node is None:
            return
        if node.parent is not None:
            del node.parent.children[node.tokens]
        if self.checkpoints is not None and node.checkpoint is not None:
            self.checkpoints.hold(node.checkpoint)  # free at once, or after its last holder
            del self._saved[node.checkpoint]
            self.release_checkpoint(node.checkpoint)
        for child in list(node.children.values()):
            self._forget(child.page)

    def release_checkpoint(self, checkpoint: int) -> None:
        """Remove a holder of a checkpoint."""
        if self.checkpoints is not None:
            self.checkpoints.release(checkpoint, keep=checkpoint in self._saved)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
