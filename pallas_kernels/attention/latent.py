"""Multi-head latent attention (DeepSeek-AI 2024, 2.1) in its absorbed form: all query heads read one row of
each token, and values are the first numbers of the row."""

from collections.abc import Callable, Mapping

from jaxtyping import Array, Float, Int

from pallas_kernels import cache_layouts, selection
from pallas_kernels.attention.api import EXACT, TAPS
from pallas_kernels.attention.reference import NO_TAPS, attention, write_pages
from pallas_kernels.cache_layouts import Pages
from pallas_kernels.problems import Attention


def attend_latent(
    q: Float[Array, "B T H D"],
    rows: Float[Array, "B T D"],
    pages: Pages,
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    values: int,
    scale: float,
    num_keys: int | Int[Array, ""],
    impl: str = "reference",
    prefill_impl: str = "reference",
    taps: Mapping[str, Callable[[Array], Array]] = NO_TAPS,
) -> tuple[Float[Array, "B T H V"], Pages]:
    """Store a row for each new token, and attend to all rows.

    out = softmax(scale q rows^T, over rows at positions <= the query's) rows[:, :values]

    q       queries, multiplied with the keys' up-projection, beside what rope has turned
    rows    of the new tokens: the latent vector, beside what rope has turned of the key
    pages   the cache, [L, pages, page_size, 1, D]; block_table, positions, layer, num_keys as for `attention`
    values  numbers of a row, the first, that are its value
    impl, prefill_impl  the candidates for one token a row and for more (selection.py)
    taps    {name: x -> x} on "scores" and "pattern", in the reference alone
    Returns float32 [B, T, H, values], and the pages with the rows stored (in place, where they are donated).
    Raises ValueError where sizes do not fit each other, and NotImplementedError for taps with a kernel.
    """
    D = cache_layouts.shape(pages)[-1]
    if q.ndim != 4 or q.shape[3] != D or rows.shape != (*q.shape[:2], D) or not 0 < values <= D:
        raise ValueError(
            f"attend_latent: q is {list(q.shape)}, rows are {list(rows.shape)}, values {values}; with rows "
            f"of {D} in the cache give q as [B, T, H, {D}], rows as [B, T, {D}], and values up to {D}"
        )
    name = impl if q.shape[1] == 1 else prefill_impl
    inner = {site: tap for site, tap in taps.items() if site in TAPS}
    if inner and name not in EXACT:
        raise NotImplementedError(
            f"attend_latent: taps on {', '.join(inner)} with the kernel {name!r}, which keeps them to "
            "itself; they need 'reference'"
        )
    layout = cache_layouts.recognize(pages)
    pages = write_pages(pages, layout.rotate(rows)[:, :, None], block_table, positions, layer)
    kernel = selection.get(Attention, name)
    rest = {"num_keys": num_keys, "window": None, "scale": scale, "softcap": None, "sinks": None}
    where = (pages, pages, block_table, positions, layer)
    if inner:
        out = attention(layout.rotate(q), *where, **rest, taps=inner)
    else:
        out = kernel(layout.rotate(q), *where, **rest)
    return layout.rotate(out)[..., :values], pages
