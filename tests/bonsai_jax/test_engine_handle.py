"""`Handle` by itself, without an engine."""

import threading

import pytest

from bonsai_jax.engine.handle import Handle


@pytest.mark.parametrize("read", [list, Handle.result, lambda handle: handle.results(timeout_s=3600)])
def test_a_signal_handler_that_cancels_just_before_the_wait_is_noticed(read):
    """It runs in the thread that reads, so that the lock does not keep it out and nobody waits yet."""
    handle, over = Handle(1, 3), threading.Event()
    wait, waits = handle._changed.wait, []

    def interrupted(timeout=None):
        if not waits:
            handle.cancel()
        waits.append(timeout)
        return wait(timeout)

    handle._changed.wait = interrupted
    threading.Thread(target=lambda: (read(handle), over.set()), daemon=True).start()
    assert over.wait(30) and waits and handle.done


def test_a_timeout_is_kept():
    with pytest.raises(TimeoutError, match=r"after 0\.3 s"):
        Handle(1, 3).result(timeout_s=0.3)
