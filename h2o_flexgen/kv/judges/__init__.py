"""Judges: ways to say what a token is worth when it is written, before anybody has attended to it."""
