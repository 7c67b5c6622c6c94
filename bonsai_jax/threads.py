"""How many threads XLA has on a CPU: it lends them to our kernels (pallas_kernels/cpu/ffi.py), which have
none of their own."""

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def use() -> None:
    """Set NPROC, which XLA reads when it is first asked for its devices, unless it is set: to
    OMP_NUM_THREADS, or to the physical cores that this process may use, where Linux tells. Two threads of a
    core share what a product needs, and one that waits takes time from the other."""
    count = _asked() or physical_cores()
    if "NPROC" not in os.environ and count:
        os.environ["NPROC"] = str(count)


def _asked() -> int:
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def physical_cores() -> int:
    """Of those that this process may use; 0 where nobody tells."""
    try:
        cpus = os.sched_getaffinity(0)
        return len({(TOPOLOGY / f"cpu{i}/topology/thread_siblings_list").read_text() for i in cpus})
    except (AttributeError, OSError):
        return 0
