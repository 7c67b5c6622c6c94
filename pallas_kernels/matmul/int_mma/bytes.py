"""A tile of 2 to 8 bits a weight as bytes and what each is worth, as one lane has them: what a format says of
its integers (tiles.Lanes), put together for the kernels that multiply bytes, or convert them one by one."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import as_real, as_word
from pallas_kernels.tiles import Lanes, Scales, WholeScales


class Unit(NamedTuple):
    """Eight scale groups of 16 rows, as lane 4 g + t holds them (pallas_kernels/tiles.py).

    a        per group, i32 words for tensor_cores.multiply_bytes
    scales   [scale] or [scale, minimum], float32, [rows g, g + 8][groups 2 t, 2 t + 1]: a byte of `a` times
             the scale, less the minimum, is a weight
    fetch    (lane, its number in a quad, or one of the same parity) -> scales as that lane of the quad has
             them
    """

    a: list
    scales: list
    fetch: Callable


def units(format_lanes: Lanes, fields: dict[str, Any], lane) -> list[Unit]:
    """All of a tile. fields: the lane's words by name, or vectors of four."""
    a = [_bytes(*group) for group in format_lanes.words.integers(fields["words"])]
    out = []
    for u, eight in enumerate(scales(format_lanes, fields, lane)):
        values = [eight.scale] + ([eight.minimum] if eight.minimum is not None else [])
        assert len(values) == 1 + format_lanes.minimums
        out.append(Unit(a[8 * u : 8 * u + 8], values, eight.fetch or _fetched(values)))
    return out


class WholeUnit(NamedTuple):
    """As Unit, in a format with WholeScales.

    words    of scale bytes, or of these and minimums' bytes
    largest  that the absolute value of a byte of `a` can be
    """

    a: list
    words: list
    largest: int


def whole_units(format_lanes: Lanes, fields: dict[str, Any], lane) -> tuple[list, list[WholeUnit]]:
    """All of a tile: (WholeScales.rows, units)."""
    groups, whole = format_lanes.words.integers(fields["words"]), format_lanes.scales(fields, lane)
    largest = 128 if format_lanes.signed else max(mask for _, mask in groups)
    a = [_bytes(*group) for group in groups]
    assert isinstance(whole, WholeScales)
    assert all(len(kinds) == 1 + format_lanes.minimums for kinds in (whole.rows, *whole.eights))
    units = [WholeUnit(a[8 * u : 8 * u + 8], words, largest) for u, words in enumerate(whole.eights)]
    return whole.rows, units


def scales(format_lanes: Lanes, fields: dict[str, Any], lane) -> list[Scales]:
    """As float32, whichever kind the format has."""
    scales = format_lanes.scales(fields, lane)
    if not isinstance(scales, WholeScales):
        return scales
    out = []
    for words in scales.eights:
        kinds = []
        for row, word in zip(scales.rows, words, strict=True):
            number = lanes.bytes_as_reals(word, signed=True)
            kinds.append([[row[r] * number[2 * r + h] for h in (0, 1)] for r in (0, 1)])
        out.append(Scales(*kinds))  # pyrefly: ignore[bad-argument-type]
    return out


def _bytes(words, mask: int) -> list:
    return [word & 0x01010101 * mask for word in words] if mask != 0xFF else list(words)


def _fetched(scales: list) -> Callable:
    fetch = lambda v, lane: as_real(lanes.from_lane(as_word(v), lane))  # noqa: E731
    return lambda lane, _: [[[fetch(v, lane) for v in row] for row in rows] for rows in scales]
