"""Kernels are chosen for the device that JAX would use, not for the machine's best one."""

import threading
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import device
from pallas_kernels.device import GPUS, Device

H100_WITH_LESS = SimpleNamespace(
    platform="gpu", compute_capability="9.0", core_count=114, shared_memory_per_block_optin=200 * 1024,
    local_hardware_id=0,
)  # fmt: skip


@pytest.fixture
def gpu_by_default(monkeypatch):
    """A process whose default backend has a GPU, beside the CPU that it really has."""
    cpu = jax.local_devices(backend="cpu")
    backends = {None: [H100_WITH_LESS], "gpu": [H100_WITH_LESS], "cpu": cpu}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: backends[backend])
    monkeypatch.setattr(jax, "devices", lambda backend=None: backends[backend])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return cpu[0]


def described():
    return Device(device.platform(), device.multiprocessors(), device.shared_bytes())


def test_nobody_waits_for_a_device_that_wakes(monkeypatch):
    """What the thread cannot do comes again where the device is used."""
    asked, wait = threading.Event(), threading.Event()

    def slow(backend=None):
        asked.set()
        wait.wait(10)
        raise RuntimeError("no device")

    monkeypatch.setattr(jax, "local_devices", slow)
    before = set(threading.enumerate())
    device.wake()
    assert asked.wait(10)
    (thread,) = (one for one in set(threading.enumerate()) - before if "wakes" in one.name)
    wait.set()
    thread.join(10)
    assert not thread.is_alive()


def test_the_default_device_is_the_one_that_jax_would_use(gpu_by_default):
    """Within jax.default_device and after it, by device and by name."""
    gpu = Device("sm_90", 114, 200 * 1024)
    cpu = Device("cpu", GPUS["sm_90"].multiprocessors, GPUS["sm_90"].shared_bytes)
    assert described() == gpu
    for chosen in (gpu_by_default, "cpu"):
        with jax.default_device(chosen):
            assert described() == cpu
            with jax.default_device("gpu"):
                assert described() == gpu
        assert described() == gpu


def test_a_jitted_function_chooses_again_under_another_default_device(gpu_by_default):
    """Shapes only: there is no GPU to run it."""
    platforms = []
    function = jax.jit(lambda x: (platforms.append(device.platform()), x + 1)[1])
    x = jax.ShapeDtypeStruct((2,), "float32")
    for chosen in ("cpu", None, "cpu"):
        with jax.default_device(chosen):
            jax.eval_shape(function, x)
    assert platforms[:2] == ["cpu", "sm_90"]
