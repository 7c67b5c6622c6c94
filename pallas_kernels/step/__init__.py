"""Kernels of a whole decode step: all layers in one launch, or a layer in a few."""
