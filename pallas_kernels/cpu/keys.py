"""The kernel of attention/cpu.py: the queries of each head against the keys of their row, page by page.

for each row, KV head and token, by one thread:
    scores of its query heads with every key            page by page, to the workspace
    (softcap,) exp(score - largest), their sum          16 at a time, and the head's sink if it has one
    weighted sum of values, over the sum of weights     page by page

A token's sums are made in the order of its keys' positions, whatever the sizes are: its bits do not depend on
how many tokens are beside it, be they a prompt's or padding.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import ffi, later
from pallas_kernels.cpu.values import (
    F32,
    I16,
    I32,
    I64,
    Value,
    Variable,
    constant,
    exp,
    loop,
    type_of,
    vector,
)

LANES = 16  # float32 of the widest vectors
MOST = 16  # vectors of heads that registers have room for beside a key
SMALL = 2**15  # numbers of keys that one thread multiplies sooner than two
SPREAD = 16  # parts into which the tokens of a row are cut
SCALE_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel: all that its code depends on but sizes.

    dtype     of keys and values
    scales    dtype of what each token's and head's numbers are times; None: they have no scale
    group     query heads of a KV head
    head_dim  a multiple of 16
    scale, window, softcap  of scores (attention/scores.py)
    sinks     whether each query head has one (attention/reference.py)
    """

    dtype: str
    scales: str | None
    group: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool = False

    def workspace(self, rows: int, tokens: int, kv_heads: int, keys: int) -> int:
        """float32 of it: scores of one token for each part."""
        return rows * kv_heads * min(tokens, SPREAD) * self.group * (keys + LANES)

    def target(self) -> str:
        """The name by which XLA knows it: made, compiled and registered on first use."""
        return later.target(self, _module)


def _module(kernel: Kernel, name: str) -> ir.Module:
    writer = _Writer(kernel)
    return ffi.handler(name, ffi.Phase(writer.parts, writer.part))


# Arguments of the call; sinks, float32 [layers, query heads], are the last where there are some.
Q, POSITIONS, TABLE, LAYER, KEYS, VALUES, KEY_SCALES, VALUE_SCALES = range(8)


class _Writer:
    """Writes a kernel's functions."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.stored = type_of(jnp.dtype(kernel.dtype))
        self.item = jnp.dtype(kernel.dtype).itemsize
        self.scale = None if kernel.scales is None else type_of(jnp.dtype(kernel.scales))

    def parts(self, frame: Value, threads: Value) -> Value:
        """SPREAD or fewer for each row and KV head; one in all where there are few keys."""
        rows, tokens, kv_heads, keys = self._sizes(frame)
        few = (rows * tokens * kv_heads * keys * self.kernel.head_dim).compared("<", SMALL)
        most = tokens.compared("<", SPREAD).select(tokens, SPREAD)
        return few.select(constant(frame.b, I64, 1), rows * kv_heads * most)

    def _sizes(self, frame: Value) -> tuple[Value, Value, Value, Value]:
        """Rows, tokens of each, KV heads, and keys that a row has room for."""
        keys = ffi.size(frame, TABLE, 1) * ffi.size(frame, KEYS, 2)
        return ffi.size(frame, Q, 0), ffi.size(frame, Q, 1), ffi.size(frame, KEYS, 3), keys

    def part(self, frame: Value, i: Value, parts: Value) -> None:
        rows, tokens, kv_heads, room = self._sizes(frame)
        units = rows * kv_heads * tokens
        scores = ffi.result(frame, 1).at(i * (4 * self.kernel.group) * (room + LANES))
        with loop(i * units / parts, (i + 1) * units / parts) as unit:
            before = unit / tokens
            self._unit(frame, before / kv_heads, unit % tokens, before % kv_heads, scores)

    def _unit(self, frame: Value, row: Value, token: Value, kv_head: Value, scores: Value) -> None:
        """The query heads of one KV head of a token."""
        kernel, b = self.kernel, frame.b
        _, tokens, kv_heads, room = self._sizes(frame)
        query = row * tokens + token
        position = ffi.argument(frame, POSITIONS).at(query * 4).load(I32).signed(I64)
        end = position + 1  # 0 for padding
        first = constant(b, I64, 0)
        if kernel.window is not None:
            first = end - kernel.window
            first = first.compared("<", 0).select(constant(b, I64, 0), first)
        stride = (room + LANES) * 4
        head = (query * kv_heads + kv_head) * kernel.group
        at_once = max(1, min(kernel.group, MOST * LANES // kernel.head_dim))
        heads = functools.partial(self._heads, frame, row, kv_head, (first, end), head, scores, stride)
        if at_once == 1:  # code for each of many wide heads would take LLVM seconds
            with loop(constant(b, I64, 0), constant(b, I64, kernel.group)) as one:
                heads([one])
            return
        for start in range(0, kernel.group, at_once):
            last = min(start + at_once, kernel.group)
            heads([constant(b, I64, h) for h in range(start, last)])

    def _heads(
        self, frame: Value, row: Value, kv_head: Value, bounds: tuple[Value, Value], head: Value,
        scores: Value, stride: Value, numbers: list[Value],
    ) -> None:  # fmt: skip
        """Some query heads of a KV head of a token, which see the keys between these bounds.

        head     the first of all, by its number among those of all tokens; numbers count from it
        scores   the workspace, of which a head has so many bytes: stride
        """
        kernel, b, (first, end) = self.kernel, frame.b, bounds
        wide = vector(F32, kernel.head_dim)
        place = [(head + h) * (4 * kernel.head_dim) for h in numbers]
        queries = [ffi.argument(frame, Q).at(at).load(wide) * kernel.scale for at in place]
        own = [scores.at(stride * h) for h in numbers]
        largest = [Variable(constant(b, F32, -3e38)) for _ in numbers]

        def score(s: Value, key: Value, scale: Value | None):
            for query, scores, most in zip(queries, own, largest, strict=True):
                value = (query * key).sum()
                value = value if scale is None else value * scale
                scores.at((s - first) * 4).store(value)
                most.value = most.value.called("llvm.maxnum", value)

        self._each(frame, KEYS, row, kv_head, first, end, score)
        sinks = [self._sink(frame, head + h) for h in numbers]
        each = zip(own, largest, sinks, strict=True)
        totals = [self._weights(scores, end - first, most.value, sink) for scores, most, sink in each]
        sums = [Variable(constant(b, wide, 0.0)) for _ in numbers]

        def add(s: Value, value: Value, scale: Value | None):
            for scores, total in zip(own, sums, strict=True):
                weight = scores.at((s - first) * 4).load(F32)
                weight = weight if scale is None else weight * scale
                total.value = value.fma(weight.splat(kernel.head_dim), total.value)

        self._each(frame, VALUES, row, kv_head, first, end, add)
        for at, total, inverse in zip(place, sums, totals, strict=True):
            ffi.result(frame, 0).at(at).store(total.value * inverse.splat(kernel.head_dim))

    def _sink(self, frame: Value, head: Value) -> Value | None:
        """The sink of a query head, which is one of all tokens' heads by number."""
        if not self.kernel.sinks:
            return None
        layer = ffi.argument(frame, LAYER).load(I32).signed(I64)
        heads = ffi.size(frame, Q, 2)
        sinks = ffi.argument(frame, KEY_SCALES if self.scale is None else VALUE_SCALES + 1)
        return sinks.at((layer * heads + head % heads) * 4).load(F32)

    def _weights(self, scores: Value, count: Value, largest: Value, sink: Value | None) -> Value:
        """exp(score - largest) in place of so many scores; 1 over their sum, with the sink's weight in it, 0
        where there are none."""
        b = scores.b
        wide = vector(F32, LANES)
        highest = self._capped(largest.splat(LANES))  # capping keeps the order
        if sink is not None:
            highest = highest.called("llvm.maxnum", sink.splat(LANES))
        total = Variable(constant(b, wide, 0.0))
        lanes = constant(b, vector(I32, LANES), np.arange(LANES))
        with loop(constant(b, I64, 0), count, LANES) as s:
            values = exp(self._capped(scores.at(s * 4).load(wide)) - highest)
            inside = lanes.compared("<", (count - s).narrow(I32).splat(LANES))
            values = inside.select(values, 0.0)
            scores.at(s * 4).store(values)
            total.value = total.value + values
        summed = total.value.sum()
        if sink is not None:
            summed = summed + exp(sink.splat(LANES) - highest).sum() * (1 / LANES)
        return summed.compared(">", 0.0).select(constant(b, F32, 1.0) / summed, 0.0)

    def _capped(self, scores: Value) -> Value:
        """softcap tanh(score / softcap)."""
        if (bound := self.kernel.softcap) is None:
            return scores
        return _tanh(scores * (1 / bound)) * bound

    def _each(
        self, frame: Value, what: int, row: Value, kv_head: Value, first: Value, end: Value,
        use: Callable[[Value, Value, Value | None], None],
    ) -> None:  # fmt: skip
        """use(s, float32 [head_dim], their scale) for the keys or values at positions first .. end - 1."""
        num_pages, page_size = ffi.size(frame, what, 1), ffi.size(frame, what, 2)
        kv_heads, table_width = ffi.size(frame, what, 3), ffi.size(frame, TABLE, 1)
        layer = ffi.argument(frame, LAYER).load(I32).signed(I64)
        table = ffi.argument(frame, TABLE).at(row * table_width * 4)
        head = self.kernel.head_dim * self.item  # bytes
        with loop(first / page_size, (end + page_size - 1) / page_size) as i:
            page = table.at(i * 4).load(I32).signed(I64)
            start = i * page_size
            low = start.compared("<", first).select(first, start)
            high = (start + page_size).compared("<", end).select(start + page_size, end)
            heads_before = ((layer * num_pages + page) * page_size) * kv_heads + kv_head
            numbers, scales = ffi.argument(frame, what).at(heads_before * head), None
            if self.scale is not None:
                scales = ffi.argument(frame, what - KEYS + KEY_SCALES).at(heads_before * SCALE_BYTES)
            with loop(low, high) as s:
                at = (s - start) * kv_heads
                stored = numbers.at(at * head).load(vector(self.stored, self.kernel.head_dim))
                scale = None if scales is None else _real(scales.at(at * SCALE_BYTES).load(self.scale))
                use(s, _real(stored), scale)


def _real(stored: Value) -> Value:
    """float32 of what is stored."""
    if stored.element is F32:
        return stored
    return stored.bfloat16() if stored.element is I16 else stored.float()


def _tanh(x: Value) -> Value:
    """Of float32, within a few units in the last place: 1 - 2 / (1 + e^2x), or near 0, where that cancels, a
    polynomial (Cephes)."""
    constant_like = functools.partial(constant, x.b, x.type)
    square, p = x * x, constant_like(-5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = p.fma(square, constant_like(c))
    near = (p * square).fma(x, x)
    far = constant_like(1.0) - constant_like(2.0) / (exp(x * 2.0) + 1.0)
    return square.compared("<", 0.625**2).select(near, far)
