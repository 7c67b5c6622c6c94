"""The state of all rows on the device (the pool), and the dispatches that change it.

    plan --calls.py--> Call: prefill or decode of some rows --> Dispatch

On one GPU a dispatch returns at once: its loop of steps is inside a CUDA graph (calls.LOOP_IN_GRAPH). Over a
mesh it returns when its steps are nearly over, because the host decides after each step whether to go on. So
`Engine` has one thread that dispatches plan after plan, while another plans and reads results. `generate` and
`stream` dispatch in the thread of their caller.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax import machine
from bonsai_jax.decoding import chain, speculation
from bonsai_jax.decoding.state import State
from bonsai_jax.engine import rows as on_device
from bonsai_jax.engine import split_guesses, split_rows
from bonsai_jax.engine.caller import Caller
from bonsai_jax.engine.calls import PARTS, Calls
from bonsai_jax.engine.mailbox import Mailbox
from bonsai_jax.engine.options import Options, pool_bytes
from bonsai_jax.engine.places import Places
from bonsai_jax.engine.plans import Limits
from bonsai_jax.engine.programs import Call, Programs
from bonsai_jax.model import Model, start_state
from bonsai_jax.network import parallel
from bonsai_jax.network.kinds.attention import PREFILL_BATCH, PREFILL_CHUNK
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.weights import placement
from pallas_kernels.device import for_threads, in_use, platform

# For Limits.for_engine on a CPU, where prefill is about as fast with few tokens as with many. SmolLM2 reads
# 32 tokens in 12 ms and 512 in 155, and of the decode step after each prefill 2 ms are the same for every
# number of rows: the cost of about 16 tokens.
ON_CPU: dict[str, Any] = {"prefill_rows": (8,), "prefill_cost": 16, "between": (12, 24)}


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A call on its way to the device.

    drawn    Result.drawn, Result.logprobs and Result.mu, on the device
    started  set when the thread that dispatches begins it
    """

    drawn: concurrent.futures.Future[list[Any]]
    started: threading.Event


class Runner:
    """Dispatches for one engine, and the pool that they change.

    threaded   dispatch in another thread; else in the caller's, where its contexts (jax.default_device) hold
    """

    def __init__(self, model: Model, options: Options, *, threaded: bool):
        self.model, self.options = model, options
        self.data = placement.size(model.mesh, placement.DATA)
        threaded = threaded and jax.process_count() == 1  # all processes must dispatch in the same order
        self._thread = (
            concurrent.futures.ThreadPoolExecutor(1, "bonsai-jax dispatch") if threaded else Caller()
        )
        # A CPU's results are in the host's memory. If Python ends while steps run, their copy would end the
        # process by SIGABRT, as jaxlib's callback wants the GIL.
        self._copies = jax.process_count() == 1 and platform() != "cpu"
        self._has_graphs = model.mesh is None and platform() != "cpu"
        self._places: Places | None = None  # of split steps, where graphs run them
        self.mailbox: Mailbox | None = None  # of draws, once there is one that waits for its masks
        if model.loaded and model.mesh is None:  # pages may be more than `load` has planned for
            machine.reserve(pool_bytes(model, options), [in_use()])
        self._pool = self._empty_pool() if model.loaded else jax.eval_shape(self._empty_pool)
        mailbox = threaded and options.speculate is None and has_mailbox(model)
        self.limits = limits(model, options, self._pool.cache.recurrent, mailbox)
        self.programs = Programs(model, self._pool)
        self._others: dict[tuple[str, ...], Programs] = {}  # by Call.parts
        self._parts: dict[str, Any] = {}  # fields of the pool, once a request needs them
        self.calls = Calls(model, options, self.limits, self._pool)

    @property
    def shares(self) -> bool:
        """Whether requests can share the beginnings of their prompts."""
        return not self.options.reproducible and (self._pool.cache.rewinds or self.options.checkpoints > 0)

    @property
    def saves(self) -> bool:
        """Whether states are saved, also at the ends of answers."""
        return self.shares and self.options.checkpoints > 0

    def need(self, part: str) -> None:
        """Make ready for programs whose pool has "hidden", those of split steps, or "chain". Call it before
        the first of them."""
        if part in self._parts:
            return
        if part == "hidden" and self.limits.mailbox and self.model.loaded:
            self._make_mailbox()
        empty = lambda: self._empty_part(part)  # noqa: E731
        self._parts[part] = empty() if self.model.loaded else jax.eval_shape(empty)
        for parts in [(part,), *([PARTS] if len(self._parts) == len(PARTS) else [])]:
            own = {name: self._parts[name] for name in parts}
            self._others[parts] = Programs(self.model, self._pool.replace(**own))

    def has_part(self, part: str) -> bool:
        """Whether `need` was called for it."""
        return part in self._parts

    def has(self, calls: Sequence[Call]) -> bool:
        """Whether none of the programs of these calls needs to be compiled."""
        return all(self._programs(call).made(call) for call in calls)

    def compile(self, call: Call) -> concurrent.futures.Future[None]:
        """Start to load or compile the program of a call in another thread."""
        return self._programs(call).compile(call)

    def compile_split(self, calls: Sequence[Call]) -> concurrent.futures.Future[None]:
        """Load or compile these programs of split steps in another thread, one after another."""
        self.need("hidden")
        return self._others[("hidden",)].compile_in_turn(calls)

    def finish_alone(self) -> None:
        """Take no more calls; threads finish the programs that they have begun."""
        for programs in (self.programs, *self._others.values()):
            programs.finish_alone()

    def _programs(self, call: Call) -> Programs:
        return self._others[call.parts] if call.parts else self.programs

    def warmup(self, calls: Sequence[Call], progress: Callable[[int, int], None]) -> None:
        """Compile the programs of these calls side by side, and run each once."""
        progress(0, len(calls))
        each = [self.compile(call) for call in calls]
        for done, one in enumerate(concurrent.futures.as_completed(each), 1):
            one.result()
            progress(done, len(calls))
        for call in calls:
            self.dispatch(call).drawn.result()
        jax.block_until_ready(self._pool)
        machine.release_memory()

    def dispatch(self, call: Call) -> Dispatch:
        """Run the call, after all calls before."""
        started, params = threading.Event(), self.model.params

        def run():
            started.set()
            program = self._programs(call).get(call)
            pool = self._pool.replace(**{part: self._parts[part] for part in call.parts})
            pool, *drawn = program(params, pool, *self._placed(call))
            self._parts |= {part: getattr(pool, part) for part in call.parts}
            self._pool = pool.replace(**dict.fromkeys(call.parts))
            if self._copies:
                for array in jax.tree.leaves(drawn):
                    array.copy_to_host_async()
            return drawn

        return Dispatch(self._thread.submit(for_threads(run)), started)

    def _placed(self, call: Call) -> Sequence[Any]:
        """A call's arrays on their way to its program."""
        if not call.stays or not self._has_graphs:
            return call.placed(self.model.mesh)
        if self._places is None:
            each = self.calls.split_padding(self.limits.max_batch_size, None)
            arrays = [array for one in each for array in one.arrays if array is not None]
            self._places = Places(sum(array.nbytes for array in arrays))
        return self._places.arrays(call)

    def catch_up(self) -> None:
        """Finish all dispatches, where there is no thread that does."""
        if isinstance(self._thread, Caller):
            self._thread.catch_up()

    def wait_until_started(self, dispatch: Dispatch) -> None:
        """Let the thread that dispatches go first, where there is one: both threads compete for the GIL, and
        a late dispatch leaves the device idle."""
        if not isinstance(self._thread, Caller):
            dispatch.started.wait()

    def use(self, model: Model) -> None:
        """Run calls that are dispatched from now on with the weights of this model, whose structure is the
        same. Waits for the calls before, so that none needs the weights before."""
        self.model = model
        for programs in (self.programs, *self._others.values()):
            programs.model = model
        self._thread.submit(lambda: None).result()

    def close_mailbox(self) -> None:
        """No draw waits for its masks any more."""
        if self.mailbox is not None:
            self.mailbox.close()

    def reset(self) -> None:
        """Make an empty pool, after all dispatches. Raises what making one raises."""
        self.close_mailbox()
        self._thread.submit(lambda: None).result()
        self._finish_draws()
        self._free()
        self._places = None  # a copy that failed may have been given one of them
        if self.mailbox is not None:
            self._make_mailbox()
        self._pool = self._empty_pool()
        self._parts = {part: self._empty_part(part) for part in self._parts}

    def close(self) -> None:
        """Free the pool's memory and end the thread."""
        self.close_mailbox()
        self._thread.shutdown()
        self._finish_draws()
        self.programs.close()
        for programs in self._others.values():
            programs.close()
        self._free()

    def _finish_draws(self) -> None:
        """Wait until the device has run all draws. Each looks into the mailbox once more, whose memory may
        then be another's. An error of theirs is raised where their results are read."""
        for array in jax.tree.leaves((self._pool, self._parts)) if self.mailbox is not None else []:
            with contextlib.suppress(RuntimeError):  # also that of an array that a failed call was given
                array.block_until_ready()

    def _make_mailbox(self) -> None:
        words = split_rows.mask_words(self.model.config.vocab_size)
        self.mailbox = Mailbox(self.options.max_batch_size, words)
        self.calls.mailbox = self.mailbox.address

    def _empty_pool(self) -> State:
        model, o = self.model, self.options
        rows, pages = o.max_batch_size * self.data, o.pages * self.data
        cache = parallel.empty_cache(
            model.config, model.run, rows, o.context, model.mesh, pages,
            checkpoints=o.checkpoints * self.data,  # on each device its rows, then its checkpoints
        )  # fmt: skip
        biases = range(min(o.biases, model.config.vocab_size))  # o.biases is the next power of two
        room = SamplingParams(0.0, seed=0, logit_bias=dict.fromkeys(biases, 0.0))
        checkpoints = o.checkpoints * self.data
        state = start_state(model, cache, room, 0, speculate=o.speculate, checkpoints=checkpoints)
        if o.adapters:
            state = state.replace(adapter=parallel.place_rows(np.zeros(rows, np.int32), model.mesh))
        return state.replace(sampler=state.sampler.replace(scored=o.sampled_logprobs))

    def _empty_part(self, part: str) -> Any:
        if part == "hidden":
            return split_rows.empty(self._pool, self.model, self.limits.guess_width)
        shape = len(self._pool.tokens), self.model.config.vocab_size, self._pool.cache.capacity
        return parallel.place_state(chain.empty(*shape), self.model.mesh)

    def _free(self) -> None:
        for array in jax.tree.leaves((self._pool, self._parts)):
            if not array.is_deleted():  # a call that failed may have been given it
                array.delete()


def has_mailbox(model: Model) -> bool:
    """Whether draws can wait on the device for their masks, where one thread makes these and another one
    dispatches: to load a program the driver may have to wait until the device is idle."""
    able = platform().startswith("sm_") and int(platform()[3:]) >= 80  # Mosaic asks for these
    return model.mesh is None and able


def limits(model: Model, o: Options, recurrent: bool, mailbox: bool = False) -> Limits:
    """What the engine's programs can do. recurrent: its cache has recurrent states."""
    on_cpu = platform() == "cpu"
    return Limits.for_engine(
        o.max_batch_size,
        o.pages,
        page_size=model.run.page_size,
        prefill_tokens=o.prefill_tokens or (PREFILL_CHUNK if on_cpu else PREFILL_BATCH),
        steps=on_device.DECODE_SIZE,
        width=1 if o.speculate is None else speculation.width(1, o.speculate),
        guess_width=split_guesses.guess_width(o.speculate, recurrent, o.max_batch_size),
        mailbox=mailbox,
        checkpoints=o.checkpoints or None,
        reproducible=o.reproducible,
        **(ON_CPU if on_cpu else {}),
    )
