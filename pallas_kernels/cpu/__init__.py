"""Kernels for CPUs: functions in the language of LLVM, written by Python, which XLA calls inside of jit."""
