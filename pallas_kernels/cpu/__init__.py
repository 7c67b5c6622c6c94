"""CPU kernels: LLVM functions, written from Python, which XLA calls inside of jit."""
