"""Reading many texts at the speed of prefill: their scores, their activations, their embeddings.

    texts -> batches of like lengths -> hidden_states (the layers alone, on kernels) -> what is asked of them

Nothing is generated, so there is no engine: texts are sorted by length, padded to few widths, and read whole.
"""
