"""Latent attention's decode kernel in numpy (lockstep) against float64."""

from unittest import mock

import numpy as np
import pytest

from pallas_kernels import attend_latent, device
from pallas_kernels.latent import empty_latent_workspace, plan
from pallas_kernels.latent.plan import Plan
from tests.pallas_kernels.latent_cases import latent_case
from tests.pallas_kernels.lockstep import lockstep

ERRORS = {"float16": 1e-3, "bfloat16": 8e-3}
SHAPES = [
    # heads, rank, rope, lengths, page_size, interleaved, multiprocessors
    (5, 256, 64, [0, 1, 15, 16, -1, 17], 16, True, 1),
    (3, 256, 32, [40, 7], 24, False, 4),
    (20, 512, 64, [150], 64, True, 7),
    (9, 256, 64, [300], 8, False, 20),  # more splits than a lane takes
    (34, 256, 32, [33], 16, True, 6),  # two blocks of heads
    (2, 256, 64, [1100, -1], 64, True, 2),  # more tiles than slots
]


def case_of(shape, dtype, **rest):
    heads, rank, rope, lengths, page_size, interleaved, _ = shape
    pages = (max(lengths) + 1) // page_size + 1
    return latent_case(
        np.asarray(lengths)[:, None], heads=heads, rank=rank, nope=32, rope=rope, value=16,
        page_size=page_size, pages=pages, dtype=dtype, interleaved=interleaved, beside=8, **rest,
    )  # fmt: skip


def run(case, blocks: int, **rest):
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: blocks):
        return attend_latent(*case.arguments, **case.keywords, impl="latent_decode", **rest)


def check(case, out, dtype):
    got, expected = np.asarray(out), case.expected
    difference = got[case.is_real] - expected[case.is_real]
    assert np.linalg.norm(difference) < ERRORS[dtype] * np.linalg.norm(expected[case.is_real])
    assert (got[~case.is_real] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention_to_all_rows(shape, dtype):
    case = case_of(shape, dtype)
    out, pages, _ = run(case, shape[-1])
    check(case, out, dtype)
    rows = case.rows[case.is_real]
    np.testing.assert_allclose(case.stored(pages), rows, rtol=ERRORS[dtype], atol=1e-5)
    # The reference's pages have the same rows everywhere else.
    _, expected, _ = attend_latent(*case.arguments, **case.keywords)
    assert (np.asarray(pages) != np.asarray(expected)).mean() < 1e-3


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_visits_have_as_many_tiles_as_a_gpu_has_room_for(tiles):
    """Of one block, which visits all keys: the last visit is not whole, and a new tile begins."""
    shape = (17, 256, 64, [96, 129], 16, True, 2)
    case = case_of(shape, "float16")
    with mock.patch.object(Plan, "tiles", tiles):
        out, *_ = run(case, shape[-1])
    check(case, out, "float16")


def test_gpus_differ_in_tiles():
    sizes = Plan(1, 20, 512, 64, 192, 64, 32, 132)
    for name, tiles in {"sm_90": 4, "sm_80": 2, "sm_89": 1}.items():
        with mock.patch.object(device, "default", lambda name=name: device.GPUS[name]):
            assert sizes.tiles == tiles
            assert plan.refuses(512, 64, 128) is None
    assert "the kernel has 256 and 512" in str(plan.refuses(384, 64, 16))


@pytest.mark.parametrize("size", [1e-5, 1e6])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_may_be_of_any_size(dtype, size):
    """Operands have as many bits of them as of others; scores are as ever."""
    shape = (3, 256, 64, [40, 5], 16, True, 4)
    case = case_of(shape, dtype, size=size)
    check(case, run(case, shape[-1])[0], dtype)


def test_layers_of_a_step_share_one_workspace():
    """What the layer before sent is still there, and is not taken for this layer's."""
    shape = (5, 256, 64, [300, 70], 16, True, 12)
    case = case_of(shape, "float16")
    *first, pages, table, positions, layer = case.arguments
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: shape[-1]):
        workspace = empty_latent_workspace(2, 5, pages, table)
        for number in (0, layer):
            out, pages, workspace = attend_latent(
                *first, pages, table, positions, number, **case.keywords, impl="latent_decode",
                workspace=workspace,
            )  # fmt: skip
            assert np.asarray(workspace & 3).max() == number + 1
        check(case, out, "float16")
        with pytest.raises(ValueError, match="workspace has 100 words"):
            attend_latent(
                *first, pages, table, positions, 0, **case.keywords, impl="latent_decode",
                workspace=workspace[:100],
            )  # fmt: skip
