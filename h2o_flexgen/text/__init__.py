"""Texts on their way to tokens and back."""
