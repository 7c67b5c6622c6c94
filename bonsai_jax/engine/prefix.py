"""Which pages hold which tokens: a tree of pages, so that a common beginning of prompts is computed once.

    root -- "You are a helpful" -- "assistant. What is" -- "a bonsai?"       each node: the tokens of a page
                               `-- "assistant. Name a"

A node is found by its parent and its tokens, the key of a dict, which hashes and then compares them. So two
different prompts cannot collide, as they can in the chain of hashes of other engines. A full page is shared.
A page that agrees only at its beginning is copied, and the new owner writes after that beginning
(copy-on-write): a shared page is never written.

A model with a recurrent state, or with rings of pages, can continue only from positions where the state was
saved too, in a checkpoint; `match` then ends at one. It may lie within a page, which is copied, as above. A
state may be as large as many pages, so there are few checkpoints, and the least recently used one is
overwritten. checkpoints.py says which positions get one.

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
    checkpoints {how many of its tokens they follow: saved states}
    """

    tokens: tuple[int, ...]
    page: int
    parent: "Node | None"
    ready: bool
    checkpoints: dict[int, int] = dataclasses.field(default_factory=dict)
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Match:
    """The beginning of a prompt that the cache has.

    pages   full pages, to be shared
    tokens  in these pages and the part of `source` that agrees
    source  a page to copy because it agrees at its beginning; None: none does
    checkpoint  the recurrent state after these tokens, for models that have one
    known   tokens that agree with a cached prompt, also those after the checkpoint
    states  every checkpoint on the way, by position
    """

    pages: list[int]
    tokens: int
    source: int | None = None
    checkpoint: int | None = None
    known: int = 0
    states: dict[int, int] = dataclasses.field(default_factory=dict)


class PrefixCache:
    """One device's `Pages`, and the tokens of those in use and idle.

    checkpoints   how many recurrent states can be saved; None: the model has only pages
    """

    def __init__(self, count: int, page_size: int, checkpoints: int | None = None):
        self.page_size = page_size
        self.checkpoints = None if checkpoints is None else Pages(checkpoints, self._overwritten)
        self._saved: dict[int, tuple[Node, int]] = {}  # by checkpoint, as Node.checkpoints
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
                # Few agree in their first token, and `_common` takes a while.
                agreeing = [c for c in self._newest(node) if c.tokens[0] == chunk[0]]
                best = max(agreeing, key=lambda c: _common(c.tokens, chunk), default=None)
                if best is not None and best.ready and (part := _common(best.tokens, chunk)):
                    match = Match(match.pages, match.tokens + part, best.page)
                return match
            if not child.ready:
                return None
            node, match = child, Match([*match.pages, child.page], match.tokens + len(chunk))
        return match

    def _match_saved(self, tokens: list[int], most: int, owner: str) -> Match | None:
        node, pages, match = self._root(owner), [], Match([], 0)
        for chunk in self._chunks(tokens[:most]):
            child = node.children.get(chunk) if len(chunk) == self.page_size else None
            if child is None:
                newest = [(c, _common(c.tokens, chunk)) for c in self._newest(node)]
                for other, common in newest:
                    self._continue(match, pages, other, common)
                match.known += max((common for other, common in newest if other.ready), default=0)
                break
            if not child.ready:
                return None
            self._continue(match, pages, child, len(chunk))
            pages.append(child.page)
            match.known += len(chunk)
            node = child
        match.known = max(match.known, match.tokens)
        return match

    def _continue(self, match: Match, pages: list[int], node: Node, agree: int) -> None:
        """Let a match of these pages go on to the last state in the node after at most `agree` tokens, if it
        has one."""
        first = len(pages) * self.page_size
        known = {first + n: checkpoint for n, checkpoint in node.checkpoints.items() if n <= agree}
        match.states.update(known)
        if known and max(known) > match.tokens:
            match.tokens, match.pages, match.source = max(known), list(pages), node.page
            match.checkpoint = known[match.tokens]
            if match.tokens == first + self.page_size:
                match.pages, match.source = [*pages, node.page], None

    def save(
        self, tokens: list[int], table: list[int], owner: str = "", *, passing: bool = False
    ) -> int | None:
        """The checkpoint for the state of a row with this table after these tokens, whose pages are known;
        None: it is saved already, or every checkpoint has a holder. Only work that is dispatched later may
        write to it.

        passing   it is the first to be overwritten
        """
        place = self._place(tokens, table, owner)
        if place is None or place[1] in place[0].checkpoints or (checkpoint := self.checkpoint()) is None:
            return None
        self._attach(checkpoint, *place, first=passing)
        return checkpoint

    def checkpoint(self) -> int | None:
        """A checkpoint with one holder, for a position that will be known later (`attach`); None: there is
        none."""
        if self.checkpoints is None or not self.checkpoints.available:
            return None
        return self.checkpoints.take(1)[0]

    def attach(self, checkpoint: int, tokens: list[int], table: list[int], owner: str = "") -> None:
        """Give up a checkpoint that this holds: it is the state of a row with this table after these tokens,
        and free where their pages are not known or have it already."""
        place = self._place(tokens, table, owner)
        if place is None or place[1] in place[0].checkpoints:
            self.release_checkpoint(checkpoint)
        else:
            self._attach(checkpoint, *place)

    def has_state(self, tokens: list[int], table: list[int], owner: str = "") -> bool:
        """Whether the state after these tokens is saved."""
        place = self._place(tokens, table, owner)
        return place is not None and place[1] in place[0].checkpoints

    def _attach(self, checkpoint: int, node: Node, count: int, first: bool = False) -> None:
        assert self.checkpoints is not None
        node.checkpoints[count] = checkpoint
        self._saved[checkpoint] = node, count
        self.checkpoints.release(checkpoint, keep=True, first=first)

    def _place(self, tokens: list[int], table: list[int], owner: str) -> tuple[Node, int] | None:
        """The node in which these tokens end, and how many of its own they are. Within a page it is that of
        the row's own page, or of another that is computed."""
        node, count = self._root(owner), 0
        for chunk, page in zip(self._chunks(tokens), table, strict=False):
            count = len(chunk)
            child = node.children.get(chunk)
            if child is None and count < self.page_size:
                able = (c for c in self._newest(node) if c.tokens[:count] == chunk)
                child = next((c for c in able if c.ready or c.page == page), None)
            if child is None:
                return None
            node = child
        return (node, count) if count else None

    def _newest(self, node: Node) -> Iterator[Node]:
        return itertools.islice(reversed(node.children.values()), SIBLINGS)

    def _overwritten(self, checkpoint: int) -> None:
        node, count = self._saved.pop(checkpoint)
        del node.checkpoints[count]

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
                own = self._nodes.get(page)
                if own is None or own.parent is not node or _common(own.tokens, chunk) < len(own.tokens):
                    if own is not None and own.parent is node and own.tokens[: len(chunk)] == chunk:
                        return  # the tree has it with more tokens
                    self._forget(page)
                    own = self._nodes[page] = Node(chunk, page, node, ready)
                else:  # with fewer tokens
                    del node.children[own.tokens]
                    own.tokens = chunk
                child = node.children[chunk] = own
            elif child.page == page:
                child.ready |= ready
            node = child

    def hold_pages(self, tokens: list[int], owner: str = "") -> list[int]:
        """The computed full pages with which these tokens begin, each with one holder more."""
        node, table = self._root(owner), []
        for chunk in self._chunks(tokens):
            child = node.children.get(chunk)
            if child is None or not child.ready or len(chunk) < self.page_size:
                break
            self.pages.hold(child.page)
            table.append(child.page)
            node = child
        return table

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
        if self.checkpoints is not None:
            for checkpoint in node.checkpoints.values():
                self.checkpoints.hold(checkpoint)  # free at once, or after its last holder
                del self._saved[checkpoint]
                self.release_checkpoint(checkpoint)
        for child in list(node.children.values()):
            self._forget(child.page)

    def release_checkpoint(self, checkpoint: int) -> None:
        """Remove a holder of a checkpoint."""
        if self.checkpoints is not None:
            self.checkpoints.release(checkpoint, keep=checkpoint in self._saved)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
