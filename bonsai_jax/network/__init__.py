"""The model as functions: layers, architectures, the cache, taps, and the same over many devices."""
