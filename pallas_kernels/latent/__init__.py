"""Latent attention over a paged cache of rows: the op, and a kernel a file."""

from pallas_kernels.latent.api import attend_latent, empty_latent_workspace

__all__ = ["attend_latent", "empty_latent_workspace"]
