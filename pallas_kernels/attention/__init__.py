"""Attention over a paged key-value cache: the op, its reference, and a kernel a file."""

from pallas_kernels.attention.api import EXACT, TAPS, attend, attend_stored, empty_workspace
from pallas_kernels.attention.reference import apply_rope, attention, write_pages

__all__ = [
    "EXACT",
    "TAPS",
    "apply_rope",
    "attend",
    "attend_stored",
    "attention",
    "empty_workspace",
    "write_pages",
]
