"""From the bytes of a file to Params: which tensors, where they lie, which kernels read them."""
