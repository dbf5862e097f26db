"""Tasks: how one cell is measured. A file for each kind."""
