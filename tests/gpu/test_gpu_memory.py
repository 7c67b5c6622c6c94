"""Memory that is taken as it is needed (XLA_PYTHON_CLIENT_PREALLOCATE=false), as the command line has it."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# A model with one row, and then an engine whose pages fill most of the GPU: grown piece by piece, XLA's
# memory would have no room for its two arrays.
PROGRAM = """
import jax, bonsai_jax as bj
model = bj.load("synth:bonsai-1.7b:q1_0", bj.RunConfig(batch_size=1, context=1024))
stats = jax.devices()[0].memory_stats()
page = model.run.page_size * 28 * 2 * 8 * 128 * 2
assert stats["pool_bytes"] < 0.1 * stats["bytes_limit"], stats
pages = int(0.85 * (stats["bytes_limit"] - stats["bytes_in_use"]) / page)
with bj.Engine(model, max_batch_size=4, pages=pages) as engine:
    assert jax.devices()[0].memory_stats()["bytes_in_use"] > 0.8 * stats["bytes_limit"]
    print(len(engine.submit("Hello", max_new_tokens=20, ignore_eos=True).result(300).tokens))
"""


def free_share() -> float:
    """How much of the first visible GPU's memory no process has."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = [
        "nvidia-smi",
        "-i",
        device,
        "--query-gpu=memory.free,memory.total",
        "--format=csv,noheader,nounits",
    ]
    free, total = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
    return int(free) / int(total)


def test_a_large_pool_fits_after_a_small_one():
    # Other workers may only be about to take theirs.
    if free_share() < 0.9 or int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("other processes have memory of this GPU; run this test without xdist: pytest -n 0")
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "20", done.stderr[-2000:]
