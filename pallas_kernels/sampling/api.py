"""The draw of a token for every row."""

from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import selection
from pallas_kernels.problems import Sampling
from pallas_kernels.sampling.rules import Rules


def draw(
    logits: Float[Array, "B V"],
    rules: Rules,
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, "B"],
    *,
    impl: str = "reference",
) -> tuple[Int[Array, "B"], Bool[Array, "tables V"], Int[Array, "tables V"]]:
    """The next token of each row, and the tables of tokens with it.

    token = argmax over what truncation keeps of  x / temperature + noise,  x the logit after penalties and
    biases, in the order in which Rules has them: top-k, top-p of what that leaves, min-p

    logits     float32
    keys       words of a key of each row. A token's noise is -log(-log u), and u depends on the row's key,
               its position and the token's id alone (Threefry-2x32 of the position makes a key, with which
               the id is counted): a row is drawn the same in any batch
    positions  of the tokens drawn, in their rows
    impl       a candidate (selection.py): "two_launches", "cpu", "reference"
    Returns int32 tokens, then `seen` and `counts` with them (in place, where they are donated). Of equal
    scores the lowest id wins. Under vmap kernels are launched once for each entry. A row without a largest
    finite number, because it has NaN or +inf or because nothing is allowed, draws NO_TOKEN, -1.

    A token stays if fewer than k are likelier, and if those that are have less than p of the sum: so ties
    stay or go together, and nothing needs to be sorted.
    """
    return selection.get(Sampling, impl)(logits, rules, keys, positions)
