"""Texts: how they become tokens, and how tokens become text."""
