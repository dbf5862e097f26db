"""Which tokens a KV cache keeps, as data: nothing here imports torch."""
