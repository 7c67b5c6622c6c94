"""In which order kernels are compiled (pallas_kernels/gpu/kernels_first.py)."""

import concurrent.futures
import threading
import types

import pytest

from pallas_kernels.gpu import kernels_first


@pytest.fixture
def compiled(monkeypatch):
    """What was done to kernels, which are (digest, size) here, in order."""
    log = []

    def program(op):
        def lower():
            log.append(("lowered", op[0]))
            return types.SimpleNamespace(compile=lambda: log.append(("compiled", op[0])))

        return lower

    attributes = lambda op: {"kernel_hash": op[0], "module": b"x" * op[1]}  # noqa: E731
    monkeypatch.setattr(kernels_first, "_attributes", attributes)
    monkeypatch.setattr(kernels_first, "_program", program)
    monkeypatch.setattr(kernels_first, "_begun", {})
    return log


def test_all_are_lowered_before_the_first_is_compiled_and_the_largest_is_first(compiled):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        futures = kernels_first._started(threads, [("a", 10), ("b", 30), ("c", 20)])
        assert [future.result(10) for future in futures] == [None] * 3
    assert compiled[:3] == [("lowered", digest) for digest in "abc"]
    assert compiled[3:] == [("compiled", digest) for digest in "bca"]


def test_a_kernel_of_two_programs_is_compiled_once(compiled):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        each = [[("a", 1), ("b", 2)], [("b", 2), ("c", 3)]]
        first, second = (kernels_first._started(threads, kernels) for kernels in each)
        assert first[1] is second[0]
        concurrent.futures.wait([*first, *second])
    assert sorted(compiled) == sorted((done, d) for done in ("compiled", "lowered") for d in "abc")


def test_programs_of_two_threads_share_their_kernels(compiled):
    kernels = [(chr(97 + i), i) for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        barrier = threading.Barrier(2)

        def started(_):
            barrier.wait()
            return kernels_first._started(threads, kernels)

        with concurrent.futures.ThreadPoolExecutor(2) as callers:
            one, other = callers.map(started, range(2))
        assert all(a is b for a, b in zip(one, other, strict=True))
        concurrent.futures.wait(one)
    assert len(compiled) == 40


@pytest.mark.parametrize(("processors", "waits"), [(2, True), (8, False)])
def test_a_program_waits_for_its_kernels_where_processors_are_few(compiled, monkeypatch, processors, waits):
    """Else XLA begins with its own passes while they are compiled, and asks for each kernel later."""
    go_on, kernels = threading.Event(), [("a", 1), ("b", 2)]
    program = kernels_first._program

    def slow(op):
        lowered = program(op)
        alone = lowered().compile
        return lambda: types.SimpleNamespace(compile=lambda: (go_on.wait(0.2 if waits else 10), alone()))

    class Program:
        def compiler_ir(self, dialect):
            return None

        def compile(self, compiler_options):
            go_on.set()
            compiled.append(("compiled", "program"))
            return "program"

    monkeypatch.setattr(kernels_first, "_program", slow)
    monkeypatch.setattr(kernels_first, "_operations", lambda module: iter(()))
    monkeypatch.setattr(kernels_first, "_kernels", lambda operations: kernels)
    monkeypatch.setattr(
        kernels_first.os, "sched_getaffinity", lambda pid: set(range(processors)), raising=False
    )
    assert kernels_first.compile(Program(), {}) == "program"
    order = [digest for done, digest in compiled if done == "compiled"]
    assert sorted(order) == ["a", "b", "program"]
    assert order.index("program") == (2 if waits else 0)
