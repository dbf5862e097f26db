"""The planning half: what to run, where it lives and when it moves. Nothing here imports torch."""
