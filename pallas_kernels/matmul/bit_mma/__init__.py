"""Products with 1-bit weights, on binary and int8 tensor cores."""
