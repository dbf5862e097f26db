"""How values are stored: the forms, one file each, without anything that computes."""
