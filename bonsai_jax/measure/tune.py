"""Which tile sizes are fastest on this device for a model's own matrices: `bonsai-jax bench --tune`.

For each product of a decode step that a kernel with sizes to tune runs (pallas_kernels/tuned.py): candidates
are compiled, checked against the product as it is now, and timed in turns, in chains over as many layers as
go beyond the L2. The best one is timed again beside what is used now, and taken if it wins by more than the
spread and LEAST_GAIN.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bonsai_jax.measure import bench, profile
from bonsai_jax.model import Model
from pallas_kernels import device, tuned
from pallas_kernels.tuned import Problem, Settings

LEAST_GAIN = 0.02
MOST_DIFFERENCE = 1e-5  # of a product, relative: another order of float32 sums
CHAIN_BYTES = 256e6  # several times an L2
CHAIN_LAUNCHES = (24, 48)  # at least, so that the host's part does not count; at most, to compile
CALLS = 5  # of a chain, for one time

# Seconds of each repetition for each of the settings, None for those that cannot run or compute nonsense.
Measure = Callable[[Sequence[Settings]], list[list[float] | None]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What was found for one problem.

    old, best     settings in use until now, and the fastest of the candidates ({}: the kernel's own plan)
    wins          whether the best is better by enough
    old_us, best_us  medians of a launch, in the last, confirming measurement
    candidates    that were timed
    failed        that could not run, or computed something else
    """

    phase: str
    problem: Problem
    old: Settings
    best: Settings
    wins: bool
    old_us: float
    best_us: float
    candidates: int
    failed: int

    @property
    def entry(self) -> dict[str, Any]:
        """As tuned.write takes it."""
        figures = {"us": round(self.best_us, 3), "us_before": round(self.old_us, 3)}
        return {"settings": self.best, **figures, "date": bench.now(), "jax": jax.__version__}


def tune(model: Model, rows: Sequence[int] = (1,), repetitions: int = 7) -> Iterator[Result]:
    """A Result for each product of a decode step of so many rows, as it is found.

    Raises NotImplementedError where no kernel of the model has sizes to tune.
    """
    found = False
    seen: set[Problem] = set()
    for count in rows:
        for phase in profile.PRODUCTS:
            for layers, asked in _asked(model, phase, count):
                for problem, of_it in asked.items():
                    if problem not in seen:
                        found = True
                        seen.add(problem)
                        chain = _Chain(model, phase, count, layers, problem, repetitions)
                        yield search(phase, problem, of_it, chain.measure, chain.launches)
    if not found:
        raise NotImplementedError(
            f"{model.source}: nothing to tune on {device.platform()}: no product of a decode step is run "
            f"by a kernel with sizes to tune ({', '.join(tuned.ALLOWED)})"
        )


def search(phase: str, problem: Problem, asked: tuned.Asked, measure: Measure, launches: int = 1) -> Result:
    """Time the stages of candidates, each beside what is in use and the best so far."""
    old, plans, failed, timed = asked.settings, {asked.plan(**asked.settings)}, 0, 0
    best, best_of_all = old, ({}, float("inf"))  # to go on from; of candidates alone
    for stage in STAGES[problem.kernel]:
        candidates = []
        for settings in ({}, *stage(best, asked.plan(**best))):
            planned = asked.plan(**settings)
            if planned is not None and planned not in plans:
                plans.add(planned)
                candidates.append(settings)
        times = measure([best, *candidates])
        failed += sum(t is None for t in times[1:])
        timed += len(candidates)
        medians = [float("inf") if t is None else statistics.median(t) for t in times]
        for settings, seconds in zip(candidates, medians[1:], strict=True):
            best_of_all = min(best_of_all, (settings, seconds), key=lambda found: found[1])
        best = [best, *candidates][medians.index(min(medians))]
    best, seconds = best_of_all
    if seconds == float("inf"):  # there was none, or none that could run
        best = old
    before, after = measure([old, best])
    assert before is not None and after is not None  # both ran a moment ago
    old_us, best_us = (1e6 * statistics.median(t) / launches for t in (before, after))
    return Result(
        phase, problem, old, best, best != old and wins(before, after), old_us, best_us, timed, failed
    )


def wins(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether times are shorter by more than LEAST_GAIN and the spread of either (its extremes left out)."""
    ordered = [sorted(times)[1:-1] if len(times) > 3 else sorted(times) for times in (before, after)]
    spread = max(times[-1] - times[0] for times in ordered)
    gain = statistics.median(before) - statistics.median(after)
    return gain > max(spread, LEAST_GAIN * statistics.median(before))


def _int_gemv_blocks(best: Settings, planned) -> Iterator[Settings]:
    for warps in (4, 8, 12, 16):
        yield {"warps": warps}
    for warps, depth in itertools.product((4, 8), (3, 6)):  # two blocks on each multiprocessor
        yield {"warps": warps, "depth": depth, "blocks": 2 * device.multiprocessors()}


def _int_gemv_depth(best: Settings, planned) -> Iterator[Settings]:
    for depth in (2, 3, 4, 6, 8, 12, 16):
        # The kernel's own number of warps depends on what is on its way, and so on the depth.
        yield {"warps": planned.warps} | best | {"depth": depth}


def _bit_gemv_tiles(best: Settings, planned) -> Iterator[Settings]:
    for tiles in (1, 2, 3, 4, 6, 8):
        yield {"warps": 8, "tiles": tiles}


def _bit_gemv_warps(best: Settings, planned) -> Iterator[Settings]:
    tiles = planned[1]
    for warps, scale in ((4, 0.5), (4, 1), (16, 1), (16, 2)):
        yield {"warps": warps, "tiles": max(1, int(scale * tiles))}


def _bit_rows(best: Settings, planned: Any) -> Iterator[Settings]:
    for warps, together in itertools.product((4, 8, 12, 16), (1, 2, 4)):
        yield {"warps": warps, "together": together}


# By kernel, what is tried: a stage gets the best settings so far and their plan.
STAGES: dict[str, tuple[Callable[[Settings, Any], Iterator[Settings]], ...]] = {
    "int_decode": (_int_gemv_blocks, _int_gemv_depth),
    "bit_decode_b1": (_bit_gemv_tiles, _bit_gemv_warps),
    "bit_decode_s8": (_bit_rows,),
}


def _asked(model: Model, phase: str, rows: int) -> Iterator[tuple[list[int], dict[Problem, tuned.Asked]]]:
    """Layers that ask for the same, by what they ask; of the head one "layer"."""
    w, config = model.params.layers, model.config
    stacks = {
        "qkv": w.wqkv,
        "attention output": (w.wo,),
    }
    if w.w_gate is not None and w.w_up is not None and w.w_down is not None:
        stacks |= {"gate and up": (w.w_gate, w.w_up), "down": (w.w_down,)}
    elif phase in ("gate and up", "down"):
        return
    if w.delta_out is not None:
        stacks |= {"delta inputs": (*w.delta_in, *w.delta_gates), "delta output": (w.delta_out,)}
    elif phase.startswith("delta"):
        return
    groups: dict[tuple, list[int]] = {}
    for layer in range(len(stacks[phase][0].where)) if phase in stacks else (0,):
        parts = tuple(stack.where[layer][0] for stack in stacks.get(phase, ()))
        groups.setdefault(parts, []).append(layer)
    for layers in groups.values():
        with tuned.trial() as asked:
            product = functools.partial(profile.PRODUCTS[phase], layer=layers[0], config=config)
            jax.eval_shape(product, model.params, _start(model, phase, rows))
        yield layers, asked


def _start(model: Model, phase: str, rows: int):
    """Random activations of a phase."""
    c, rng = model.config, np.random.default_rng(rows)
    draw = lambda width: jnp.asarray(rng.standard_normal((rows, 1, width)), jnp.float32)  # noqa: E731
    inputs = {"attention output": c.q_width, "down": c.ffn}
    if c.delta is not None:
        inputs["delta output"] = c.delta.v_width
    return (draw(inputs[phase]), draw(c.hidden)) if phase in inputs else draw(c.hidden)


class _Chain:
    """A product as a step has it, layer behind layer, with one kernel's settings exchanged."""

    def __init__(self, model: Model, phase: str, rows: int, layers: list[int], problem: Problem, repetitions):
        self.model, self.phase, self.problem, self.repetitions = model, phase, problem, repetitions
        self.state = _start(model, phase, rows)
        wanted = -(-int(CHAIN_BYTES) // max(1, self._bytes()))
        least, most = CHAIN_LAUNCHES
        self.layers = list(itertools.islice(itertools.cycle(layers), max(least, min(wanted, most))))
        self.launches = len(self.layers)
        self.leaves, self.tree = jax.tree.flatten(model.params)  # a list takes the host less time in a call
        self.compiled: dict[tuple, Any] = {}
        self.usual: np.ndarray | None = None  # what the product is with the settings in use

    def _bytes(self) -> int:
        """Of one launch, at least."""
        of_problem = self.problem
        weights = of_problem.matrices * of_problem.columns * sum(rows for _, rows in of_problem.parts)
        return weights // 8

    def _compile(self, settings: Settings, pool: concurrent.futures.Executor):
        """The chain, as a future that compiles it."""
        product, config = profile.PRODUCTS[self.phase], self.model.config

        def chain(leaves, state):
            params, first = jax.tree.unflatten(self.tree, leaves), None
            for layer in self.layers:
                y = product(params, state, layer, config)
                first = y if first is None else first
                state = profile.handed_on(y, state)
            return state, first

        try:
            with tuned.trial({self.problem: settings}):
                lowered = jax.jit(chain).lower(self.leaves, self.state)
        except Exception as error:
            refused = concurrent.futures.Future()
            refused.set_exception(error)
            return refused
        return pool.submit(lowered.compile)

    def measure(self, candidates: Sequence[Settings]) -> list[list[float] | None]:
        """See Measure. Settings that were compiled before are not again."""
        keys = [tuple(sorted(settings.items())) for settings in candidates]
        new = {key: s for key, s in zip(keys, candidates, strict=True) if key not in self.compiled}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            # Traced one by one, since a trial is this thread's; compiled side by side.
            jobs = {key: self._compile(settings, pool) for key, settings in new.items()}
        for key, job in jobs.items():
            if self.usual is not None and job.exception() is not None:
                self.compiled[key] = None  # sizes that do not suit the compiler, whatever it says
            else:
                call = job.result()
                self.compiled[key] = call if self._is_right(call) else None
        times: list[list[float] | None] = [None if self.compiled[key] is None else [] for key in keys]
        for _ in range(self.repetitions):
            for key, of_it in zip(keys, times, strict=True):
                if of_it is not None:
                    call = self.compiled[key]
                    step = lambda state, call=call: call(self.leaves, state)[0]  # noqa: E731
                    of_it += bench.seconds_per_call(step, self.state, repetitions=1, calls=CALLS)
        return times

    def _is_right(self, call) -> bool:
        """Whether the product is, but for the order of sums, what it is with the settings in use."""
        y = np.asarray(call(self.leaves, self.state)[1], np.float64)
        if self.usual is None:  # the first that is measured is in use
            self.usual = y
        difference = np.linalg.norm(y - self.usual) / np.linalg.norm(self.usual)
        return bool(difference < MOST_DIFFERENCE)  # not a number: no


COLUMNS = ("phase", "problem", "in use", "us", "best of the others", "us", "gain", "wins", "tried")


def markdown_header() -> str:
    rule = ["---:" if name in ("us", "gain", "tried") else "---" for name in COLUMNS]
    return f"| {' | '.join(COLUMNS)} |\n| {' | '.join(rule)} |"


def markdown(result: Result) -> str:
    show = lambda s: ", ".join(f"{name} {value}" for name, value in s.items()) or "its own"  # noqa: E731
    found = [show(result.best), f"{result.best_us:.2f}", f"{1 - result.best_us / result.old_us:+.1%}"]
    cells = (
        *(result.phase, str(result.problem), show(result.old), f"{result.old_us:.2f}"),
        *(found if result.best != result.old else ["none", "-", "-"]),
        "yes" if result.wins else "no",
        f"{result.candidates}" + (f" ({result.failed} failed)" if result.failed else ""),
    )
    return f"| {' | '.join(cells)} |"
