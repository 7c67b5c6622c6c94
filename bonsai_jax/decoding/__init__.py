"""Steps that draw tokens: prefill, decode, sampling, speculation."""
