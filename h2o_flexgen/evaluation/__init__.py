"""How good the text is under a KV policy: tasks, their cells, tables and pictures."""
