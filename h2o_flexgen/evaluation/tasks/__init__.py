"""Tasks: how one cell is measured, a file for each kind."""
