"""Kernels for CPUs: functions in LLVM's language, written by Python as it runs, called by XLA inside of jit."""
