"""The programs of an engine, which can be compiled in threads before they are called."""

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax.decoding.state import State
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.progress import said_after

compiled: set[Hashable] = set()  # programs that this process has


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of rows.py, which returns a rows.Result, and its arguments after the model's parameters and
    the pool.

    name   what it does, for people
    """

    name: str
    function: Any
    arrays: Sequence[np.ndarray | None]
    static: Sequence[Any]
    options: dict[str, Any]

    @property
    def program(self) -> Hashable:
        """The same for all calls of one program."""
        shapes = tuple(None if a is None else a.shape for a in self.arrays)
        return self.function, shapes, *self.static, *self.options.items()

    def placed(self, mesh: jax.sharding.Mesh | None) -> Sequence[Any]:
        """Its arrays, where the program wants them."""
        if mesh is None:
            return self.arrays
        return [a if a is None else parallel.place_rows(a, mesh) for a in self.arrays]


class Programs:
    """The programs for one model and pool."""

    def __init__(self, model: Model, pool: State):
        self._model = model
        # Shapes in place of the pool, which the calls that run meanwhile donate.
        self._pool = jax.eval_shape(lambda state: state, pool)
        if model.mesh is not None:
            self._pool = jax.tree.map(lambda x, y: x.update(sharding=y.sharding), self._pool, pool)
        self._kind = tuple((x.shape, x.dtype, x.sharding) for x in jax.tree.leaves((model.params, pool)))
        self._begun: dict[Hashable, concurrent.futures.Future[None]] = {}
        self._called: set[Hashable] = set()
        # Several processes must compile in the same order.
        self._threads = concurrent.futures.ThreadPoolExecutor(
            os.cpu_count() if jax.process_count() == 1 else 1, "bonsai-jax compile"
        )

    def compile(self, call: Call) -> concurrent.futures.Future[None]:
        """Compile the program of a call in another thread, as XLA releases the GIL, unless this process has
        it."""
        if call.program not in self._begun:
            device = jax.config.jax_default_device  # a context of this thread

            def work() -> None:
                if self._identity(call) in compiled:
                    return
                arguments = self._model.params, self._pool, *call.placed(self._model.mesh), *call.static
                with jax.default_device(device):  # jit finds the program when it is called
                    call.function.lower(*arguments, **call.options).compile()
                compiled.add(self._identity(call))

            self._begun[call.program] = self._threads.submit(work)
        return self._begun[call.program]

    @contextlib.contextmanager
    def ready(self, call: Call) -> Iterator[None]:
        """Wait for the program, if it is being compiled. The block calls it, which else compiles it. A line
        on stderr says so if that takes more than a second."""
        if call.program in self._called:
            yield
            return
        with said_after(1.0, f"compiling {call.name}"):
            if call.program in self._begun:
                self._begun[call.program].result()
            yield
        self._called.add(call.program)
        compiled.add(self._identity(call))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _identity(self, call: Call) -> Hashable:
        return call.program, self._kind
