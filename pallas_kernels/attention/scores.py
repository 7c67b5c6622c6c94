"""How queries score keys: what a layer may set, and how kernels compute it with weights that are powers of
two."""

import dataclasses
import math

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Scores:
    """score = scale q k, then softcap tanh(score / softcap); a key outside the window has none.

    window   keys that a query sees, the last of them its own; None: all up to its own
    scale    None: 1 / sqrt(head_dim)
    softcap  scores stay between -softcap and softcap; None: they are not bounded

    Raises ValueError for a window or a softcap that is not positive.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"attention: window is {self.window}; a query sees at least itself, which is window=1"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"attention: softcap is {self.softcap}; it is positive, or None for no bound")

    def factor(self, head_dim: int) -> float:
        """The scale of scores."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def query_factor(self, head_dim: int) -> float:
        """What kernels multiply queries by, so that `capped` of their products with keys is log2(e) score."""
        if self.softcap is None:
            return self.factor(head_dim) * LOG2_E
        return 2 * LOG2_E / self.softcap * self.factor(head_dim)

    def capped(self, product, exp2, reciprocal):
        """log2(e) score of a product x of a key with a query times `query_factor`.

        softcap tanh(y) = softcap (1 - 2 / (1 + e^2y)), e^2y = 2^x: exact to float32 where it is large, unlike
        the tanh of GPUs, which has 11 bits.
        """
        if self.softcap is None:
            return product
        bound = self.softcap * LOG2_E
        return bound - 2 * bound * reciprocal(exp2(product) + 1.0)


PLAIN = Scores()
