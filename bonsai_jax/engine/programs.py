"""The programs of an engine: loaded from files (stored.py), or compiled, which threads can do before they are
called."""

import concurrent.futures
import contextlib
import dataclasses
import inspect
import os
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax.engine import stored
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.progress import said_after
from pallas_kernels import device
from pallas_kernels.gpu import kernels_first

MOST = 1024  # programs that a process keeps
# Those that it has or is making, the oldest first.
compiled: dict[Hashable, concurrent.futures.Future[jax.stages.Compiled]] = {}
_LOCK = threading.Lock()
# Python traces one program at a time: they share the GIL, and so the first is being compiled while the second
# is traced.
_TRACING = threading.Lock()
_last_turn = threading.Event()  # of the program that was begun last: set once it is lowered, or need not be
_last_turn.set()
_NO_TURN = contextlib.nullcontext()
TURN_S = 1.0  # longest wait for a turn: the order only saves time, and whoever is before may wait for us


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of rows.py, which returns a rows.Result, and its arguments after the model's parameters and
    the pool.

    name     what it does, for people
    options  keyword arguments
    flags    XLA's options for the program
    parts    fields of State that its pool has and others do not: "hidden" (split_rows.py), "chain"
    stays    its arrays, like the rest of what it uses, lie where those of the program's last call did
             (places.py)
    """

    name: str
    function: Any
    arrays: Sequence[np.ndarray | None]
    static: Sequence[Any]
    options: dict[str, Any]
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] = ()
    stays: bool = False

    @property
    def program(self) -> Hashable:
        """The same for all calls of one program."""
        return self.function, *self._made_from()

    @property
    def source(self) -> Any:
        """What tells it from other programs in every process; None: its function is not one of a module."""
        function = inspect.unwrap(self.function)
        name = getattr(function, "__name__", "")
        known: Any = getattr(sys.modules[function.__module__], name, None)
        if inspect.unwrap(known) is not function:
            return None
        return function.__module__, name, *self._made_from()

    def _made_from(self) -> tuple[Hashable, ...]:
        arrays = tuple(None if a is None else (a.shape, a.dtype.str) for a in self.arrays)
        return arrays, *self.static, *self.options.items(), *self.flags.items()

    def placed(self, mesh: jax.sharding.Mesh | None) -> Sequence[Any]:
        """Its arrays, where the program wants them."""
        if mesh is None:
            return self.arrays
        return [a if a is None else parallel.place_rows(a, mesh) for a in self.arrays]


def shapes_of(tree: Any) -> Any:
    """Shapes in place of arrays, without tracing, which jax.eval_shape does."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


class Programs:
    """The programs for one model and pool (any tree of arrays that they are given first), or for their
    shapes."""

    def __init__(self, model: Model, pool: Any):
        self.model = model  # of which programs take shapes and places alone; engines set another
        # Shapes in place of the pool, which the calls that run meanwhile donate.
        self._pool = shapes_of(pool)
        if model.mesh is not None:
            self._pool = jax.tree.map(lambda x, y: x.update(sharding=y.sharding), self._pool, pool)
        leaves, structure = jax.tree.flatten((model.params, pool))
        where = {device.in_use()} if not model.loaded else leaves[0].devices()
        places = [x.sharding if model.mesh is not None else None for x in leaves]
        kinds = [(x.shape, x.dtype, place) for x, place in zip(leaves, places, strict=True)]
        self._kind = structure, tuple(sorted(map(str, where))), *kinds
        self._begun: dict[Hashable, concurrent.futures.Future[Any]] = {}
        self._called: dict[Hashable, jax.stages.Compiled] = {}
        self._keys: dict[Hashable, str | None] = {}  # by `_identity`
        self._closed = False
        # Several processes must compile in the same order.
        self._threads = concurrent.futures.ThreadPoolExecutor(
            os.cpu_count() if jax.process_count() == 1 else 1, "bonsai-jax compile"
        )

    def compile(self, call: Call) -> concurrent.futures.Future[Any]:
        """Load or compile the program of a call in another thread, as XLA releases the GIL, unless this
        process has it. Programs are lowered in the order in which they are begun, so that a CPU's kernels are
        compiled in this order, too."""
        global _last_turn
        if call.program in self._begun:
            return self._begun[call.program]
        if (known := self._known(call)) is not None:
            self._begun[call.program] = known
            return known
        device, settings = jax.config.jax_default_device, stored.settings()  # contexts of this thread

        def work() -> None:
            with jax.default_device(device):
                # Under another context of the caller's, such as a precision, `get` compiles.
                if stored.settings() == settings:
                    self._made(call, _turn(before, own))

        with _LOCK:
            before, own = _last_turn, threading.Event()
            _last_turn = own
            begun = self._begun[call.program] = self._threads.submit(work)
        begun.add_done_callback(lambda _: own.set())
        return begun

    def compile_in_turn(self, calls: Sequence[Call]) -> concurrent.futures.Future[None]:
        """Load or compile programs in one other thread, one after another, so that what runs meanwhile has
        most of the processors. `close` ends it after the program that it is at."""

        def work() -> None:
            for call in calls:
                if not self._closed:
                    self._made(call)

        return self._threads.submit(work)

    def made(self, call: Call) -> bool:
        """Whether the program of a call need not be compiled: this process has it or is making it, or a file
        does."""
        with _LOCK:
            if self._identity(call) in compiled:
                return True
        key = self._key(call)
        return key is not None and stored.has(key)

    def get(self, call: Call) -> jax.stages.Compiled:
        """The program of a call, to be called with its arrays: after waiting for it, if a thread compiles it,
        or else loaded or compiled here. A line on stderr says so if that takes more than a second."""
        program = self._called.get(call.program)
        if program is None and (known := self._known(call)) is not None:
            program = self._called[call.program] = known.result()
        elif program is None:
            with said_after(1.0, f"compiling {call.name}"):
                if call.program in self._begun:
                    self._begun[call.program].result()
                program = self._called[call.program] = self._made(call)
        return program

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(cancel_futures=True)

    def finish_alone(self) -> None:
        """Take no more calls; threads finish what they have begun, for whoever asks this process for it."""
        self._threads.shutdown(wait=False)

    def _known(self, call: Call) -> concurrent.futures.Future[Any] | None:
        """The program, if this process has it by now and nobody needs to wait for it."""
        with _LOCK:
            future = compiled.get(self._identity(call))
        return future if future is not None and future.done() and future.exception() is None else None

    def _made(
        self, call: Call, turn: contextlib.AbstractContextManager[None] = _NO_TURN
    ) -> jax.stages.Compiled:
        """The program, which only one thread of this process makes. turn: around its lowering."""
        identity = self._identity(call)
        own: concurrent.futures.Future[jax.stages.Compiled] = concurrent.futures.Future()
        with _LOCK:
            future = compiled.setdefault(identity, own)
            while len(compiled) > MOST:
                compiled.pop(next(iter(compiled)))
        if future is own:
            try:
                own.set_result(self._loaded_or_compiled(call, turn))
            except BaseException as error:  # told to whoever waits, too
                compiled.pop(identity, None)
                own.set_exception(error)
        return future.result()

    def _loaded_or_compiled(
        self, call: Call, turn: contextlib.AbstractContextManager[None]
    ) -> jax.stages.Compiled:
        """The program, from a file, or compiled."""
        key, began = self._key(call), time.perf_counter()
        mesh = self.model.mesh
        arrays = self.model.params, self._pool, *(call.arrays if mesh is None else call.placed(mesh))
        program = None if key is None else stored.load(key, arrays, self._devices())
        if program is None:
            with turn, _TRACING:
                lowered = call.function.lower(*arrays, *call.static, **call.options)
            if key is None:
                program = kernels_first.compile(lowered, call.flags)
            else:
                program = stored.compile(key, lowered, call.flags)
        else:
            jax.monitoring.record_event_duration_secs(stored.LOADED, time.perf_counter() - began)
        return program

    def _identity(self, call: Call) -> Hashable:
        """The same for all programs of this process that are the same."""
        return call.program, self._kind, stored.settings()

    def _key(self, call: Call) -> str | None:
        """The name of its program's file; None: it has none."""
        identity = self._identity(call)
        if identity not in self._keys:
            alone = call.source is not None and jax.process_count() == 1
            self._keys[identity] = stored.key(call.source, self._kind) if alone else None
        return self._keys[identity]

    def _devices(self) -> list[jax.Device]:
        mesh = self.model.mesh
        return [device.in_use()] if mesh is None else list(mesh.devices.flat)


@contextlib.contextmanager
def _turn(before: threading.Event, own: threading.Event) -> Iterator[None]:
    """Begin after the turn before has ended, but not much later."""
    before.wait(TURN_S)
    try:
        yield
    finally:
        own.set()
