"""The forms in which values are stored, one file each. Nothing here computes."""
