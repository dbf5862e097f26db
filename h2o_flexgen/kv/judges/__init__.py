"""Judges: ways to say what a token is worth when it is written, before any query has attended to it."""
