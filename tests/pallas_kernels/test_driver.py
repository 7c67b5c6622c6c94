"""A process's share of a GPU: what the driver says, and the launches that it leaves room for."""

import ctypes
import dataclasses
import types

import pytest

from pallas_kernels import device
from pallas_kernels.gpu import driver
from pallas_kernels.selection import choose, explain
from tests.pallas_kernels.test_selection import KQ_STEP, MOE_STEP, STEP

NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED


class Driver:
    """Stands in for libcuda since CUDA 11.4. `fails` maps functions to the errors that they return."""

    def __init__(self, share: int, **fails: int):
        self.share, self.fails, self.retained, self.stack = share, fails, [], [7]

    def cuDeviceGet(self, gpu, ordinal):
        gpu._obj.value = 40 + ordinal
        return self.fails.get("cuDeviceGet", 0)

    def cuDevicePrimaryCtxRetain(self, context, gpu):
        if error := self.fails.get("cuDevicePrimaryCtxRetain"):
            return error
        self.retained.append(gpu.value)
        context._obj.value = 1000 + gpu.value
        return 0

    def cuCtxPushCurrent_v2(self, context):
        if error := self.fails.get("cuCtxPushCurrent_v2"):
            return error
        self.stack.append(context.value)
        return 0

    def cuCtxGetExecAffinity(self, answer, kind):
        assert kind == 0 and self.stack[-1] == 1041
        if error := self.fails.get("cuCtxGetExecAffinity"):
            return error
        # CUexecAffinityParam: an enum and a union whose only member is an unsigned int.
        (ctypes.c_uint * 2).from_buffer(answer._obj)[:] = kind, self.share
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.stack.pop()
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, gpu):
        self.retained.remove(gpu.value)
        return 0


GPU = types.SimpleNamespace(core_count=132, shared_memory_per_block_optin=227 * 1024, local_hardware_id=1)


@pytest.fixture
def gpu(monkeypatch):
    """The Device of an H200, by a driver."""

    def by(library) -> device.Device:
        def load():
            if library is None:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return library

        monkeypatch.setattr(driver, "load", load)
        driver.multiprocessors.cache_clear()
        return device._usable(GPU, "sm_90")

    yield by
    driver.multiprocessors.cache_clear()


def test_a_process_has_as_many_multiprocessors_as_the_driver_gives_it(gpu):
    library = Driver(66)
    assert gpu(library) == device.Device("sm_90", 66, 227 * 1024, whole=132)
    assert library.retained == [] and library.stack == [7]  # the context is as it was
    assert gpu(Driver(132)) == device.GPUS["sm_90"]


@pytest.mark.parametrize("function", ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"])
def test_without_an_answer_the_gpu_is_whole(gpu, function):
    library = Driver(66, **{function: NOT_SUPPORTED})
    assert gpu(library) == device.GPUS["sm_90"]
    assert library.retained == [] and library.stack == [7]


def test_a_gpu_that_cannot_be_shared_out_is_whole(gpu):
    library = Driver(66, cuCtxGetExecAffinity=NOT_SUPPORTED)
    assert gpu(library) == device.GPUS["sm_90"]
    assert library.retained == [] and library.stack == [7]


@pytest.mark.parametrize("library", [None, types.SimpleNamespace()], ids=["no driver", "an older driver"])
def test_a_driver_that_does_not_know_shares_is_no_error(gpu, library):
    assert gpu(library) == device.GPUS["sm_90"]


@pytest.mark.parametrize(
    ("problem", "schedule", "fits", "refused"),
    [(STEP, "one_launch", 128, 66), (KQ_STEP, "one_launch", 66, None), (MOE_STEP, "one_launch", 66, 6)],
    ids=["one_launch", "integers", "experts"],
)
def test_a_persistent_launch_fits_the_share_or_is_refused(problem, schedule, fits, refused, monkeypatch):
    """Of an 8B model in one launch: half of an H200 has no room for a layer's weights."""

    def share(count):
        part = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=count, whole=132)
        monkeypatch.setattr(device, "default", lambda: part)

    share(fits)
    assert choose(problem) == schedule
    if refused is not None:
        share(refused)
        (verdict,) = (v for v in explain(problem) if v.kernel == schedule)
        assert f"MPS gives this process {refused} of the GPU's 132 multiprocessors" in verdict.reason
        assert "raise its active thread percentage" in verdict.reason
