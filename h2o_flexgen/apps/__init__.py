"""Applications on top of the engine, each a command of its own."""
