"""How many threads XLA uses on a CPU. Our CPU kernels run on these threads (pallas_kernels/cpu/ffi.py)."""

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def use() -> None:
    """Set NPROC, which XLA reads when it creates its CPU devices, unless it is set already: to
    OMP_NUM_THREADS, else to the number of physical cores that this process may use, if Linux reports it. Two
    threads of one core would compete for its multipliers, and a waiting one would slow the other down."""
    count = _requested() or physical_cores()
    if "NPROC" not in os.environ and count:
        os.environ["NPROC"] = str(count)


def _requested() -> int:
    """OMP_NUM_THREADS, of a list its first number; 0 if it is not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def physical_cores() -> int:
    """Physical cores that this process may use; 0 if the system does not report them."""
    try:
        cpus = os.sched_getaffinity(0)
        return len({(TOPOLOGY / f"cpu{i}/topology/thread_siblings_list").read_text() for i in cpus})
    except (AttributeError, OSError):
        return 0
