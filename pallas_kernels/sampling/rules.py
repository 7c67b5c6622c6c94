"""What a draw goes by, row by row."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

NO_TOKEN = -1  # drawn where no token can be


class Rules(NamedTuple):
    """How the next token of each of B rows is drawn.

    temperature         0: the likeliest token, and the truncations do not matter
    top_k               keep the k likeliest, and those tied with the k-th; 0: all
    top_p               keep the fewest likeliest that have p or more of what top-k keeps, and those tied with
                        the last; 1: all
    min_p               keep those at least min_p times as likely as the likeliest
    temperature_first   likely, for top-p and min-p, is what is likely at this temperature, else at 1
    repetition_penalty  logits of tokens that are `seen` are divided by it if positive, else multiplied
    presence_penalty    subtracted from the logits of tokens with a count
    frequency_penalty   times the count, subtracted too
    bias_ids, bias      added to the logits of these tokens; an id beyond the vocabulary is nobody's
    seen, counts        tables of the vocabulary's tokens; read for rows with penalties only
    table               of these, which each row has: no two rows the same; one beyond all: the row has none,
                        and its token is not counted
    allowed             bit i % 32 of word i // 32: token i may be drawn; None: any
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    temperature_first: Bool[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    bias_ids: Int[Array, "B M"]
    bias: Float[Array, "B M"]
    seen: Bool[Array, "tables V"]
    counts: Int[Array, "tables V"]
    table: Int[Array, "B"]
    allowed: UInt32[Array, "B words"] | None = None
