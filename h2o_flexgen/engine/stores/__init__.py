"""Where the data of a run lives: weights, KV and hidden states."""
