"""The profile of a machine: all that pricing asks of it, measured with the very means that a run uses."""
