"""The sources of weights: files and folders of every kind, what is made of them once, and random weights."""
