"""Products with weights of 2 to 8 bits, on int8 and float16 tensor cores."""
