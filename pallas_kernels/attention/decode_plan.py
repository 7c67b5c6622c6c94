"""How a decode step's attention is shared out to blocks: sizes that are known before a kernel is traced.

A team of warps has one row, one KV head's query heads (or a part of them, where there are more than 7), and
one split of the row's keys. Splits depend on a row's own length only, and are combined in order: a row's bits
do not depend on other rows' keys.

Few rows have a block of 8 warps for each split. Of more rows than there are blocks at once, a block for each
would wait for one thing after another, alone on its multiprocessor: then a team is a block of 4 warps, of
which four run at once, or one warp, and the GPU hands out blocks as others end, whatever their rows' lengths.
"""

import dataclasses

from pallas_kernels.attention.scores import PLAIN, Scores

THREADS, WARPS = 256, 8
KEYS = 16  # of a warp at a time
TILE = 16  # dimensions of values that a tensor core makes at a time
BLOCKS_AT_ONCE = 4  # of 4 warps on a multiprocessor: 128 registers a thread
MOST_HEADS = 7  # of a block: the eighth row of lanes has the new key
KEYS_PER_SPLIT = KEYS * WARPS  # as many are on their way before q arrives
KEYS_OF_SEVERAL = 96  # of each split of a row that has several, if there are blocks for that


@dataclasses.dataclass(frozen=True)
class Plan:
    """`group` query heads to each of `kv_heads`; `pages` of a row; at most `most_blocks` blocks, one on each
    multiprocessor."""

    rows: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    pages: int
    most_blocks: int
    normed: bool
    eps: float
    interleaved: bool
    pairs: int | None = None  # that rope turns in a head; None: all; 0: none, q and k are turned already

    gated: bool = False  # each query is followed by its gate, by whose sigmoid outputs are multiplied
    scores: Scores = PLAIN
    one_launch: bool = False  # a phase of a launch, whose blocks all run at once; 8 warps of each attend
    tokens: int = 1  # neighbouring rows that are one sequence's tokens, one after another
    all_splits: bool = False  # whether a row with several splits has all of them
    apart: bool = False  # whether splits are left to who reads a row's outputs (`Attention.received`)
    other_warps: bool = False  # whether a block of one launch has more warps, which do not attend

    @property
    def turned(self) -> bool:
        return self.pairs != 0

    @property
    def heads(self) -> int:
        """Query heads of a block."""
        return next(n for n in range(MOST_HEADS, 0, -1) if self.group % n == 0)

    @property
    def columns(self) -> int:
        """Of a tensor core's 8 columns those of a head: 2, of its high and of its low parts, or 1, for which
        parts are multiplied one after the other."""
        return 2 if self.heads <= 4 else 1

    @property
    def products(self) -> int:
        """By which 16 keys and values are multiplied, one after the other."""
        return 3 - self.columns

    @property
    def heads_at_once(self) -> int:
        """Heads that a tensor core's columns have room for."""
        return 8 // self.columns

    @property
    def owners(self) -> int:
        """Rows times blocks of query heads."""
        return self.rows * self.kv_heads * self.group // self.heads

    @property
    def most_splits(self) -> int:
        """Blocks that there are for each row's block of query heads."""
        return self.most_blocks // self.owners

    @property
    def splits(self) -> int:
        """Splits of a row's keys, at most."""
        keys = self.pages * self.page_size
        if self.scores.window is not None:
            keys = min(keys, self.scores.window + KEYS - 1)
        if keys <= self.keys_of_one_split:
            return 1
        return max(1, min(-(-keys // KEYS_OF_SEVERAL), self.most_splits))

    @property
    def keys_of_one_split(self) -> int:
        """The most keys of a row that one block reads alone. Where there are two blocks a row at most, in a
        launch of attention only, they take longer to meet than one to visit its keys twice (LOG.md)."""
        return KEYS_PER_SPLIT if self.one_launch or self.most_splits > 2 else 2 * KEYS_PER_SPLIT

    @property
    def team(self) -> int:
        """Warps that share a split."""
        if self.owners <= self.most_blocks:
            return WARPS
        if self.one_launch:
            return WARPS // 2
        return 1 if 3 * self.owners >= 2 * WARPS * self.most_blocks else 4

    @property
    def in_one_visit(self) -> bool:
        """Whether warps share out the values of as many keys as they have in one visit, and not these keys
        alone (decode_values.py). A team that is smaller, or alone with its row, mostly has more keys."""
        return self.team == WARPS and self.most_splits > 1

    @property
    def warps(self) -> int:
        """Of a block, that attend."""
        return WARPS if self.one_launch else max(4, self.team)

    @property
    def teams(self) -> int:
        """Of a block; where there are several, each is a warp, or four."""
        return self.warps // self.team

    @property
    def blocks(self) -> int:
        if self.one_launch:  # all have a team before one has two
            return min(self.owners * self.splits, self.most_blocks)
        return -(-self.owners * self.splits // self.teams)

    @property
    def scratch(self) -> int:
        """float32 of shared memory."""
        return self.teams * self.team_scratch

    @property
    def team_scratch(self) -> int:
        """float32 of a team: `sums`, then maxima and totals [heads, warps]. A multiple of 4, as its parts are
        loaded four at once."""
        return -(-(self.sums + self.team * self.heads * 2) // 4) * 4

    @property
    def sums(self) -> int:
        """float32 of a team: sums [warps, heads, head_dim], and before them new tokens, and what warps tell
        each other."""
        return max(self.team * self.heads * self.head_dim, self.new_token + self.between)

    @property
    def new_token(self) -> int:
        """float32 that new tokens take, a multiple of 4: their queries [heads, head_dim], keys and values
        [tokens, head_dim] each, units [heads], scales of keys and values (decode_token.py)."""
        numbers = (self.heads + 2 * self.tokens) * self.head_dim + self.heads + 2 * self.tokens
        return -(-numbers // 4) * 4

    @property
    def between(self) -> int:
        """Words through which warps tell each other their weights, a multiple of 4 (decode_values.py)."""
        return (self.products * 64 + 2 * self.heads_at_once) * self.team if self.in_one_visit else 0

    @property
    def partial(self) -> int:
        """Words of a split: its outputs [heads, head_dim], then by head the log2 of its sum of weights; a
        multiple of 4."""
        return -(-self.heads * (self.head_dim + 1) // 4) * 4

    @property
    def partials(self) -> int:
        """Words of the workspace, in which splits meet."""
        return self.owners * self.splits * self.partial
