"""GPU kernels through Pallas Mosaic GPU: each a phase of a decode step. Imported only where a kernel is
used."""
