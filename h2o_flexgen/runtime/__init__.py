"""The running half: executes a schedule on real memory."""
