"""The types that every package uses: sizes, texts for people, files. Nothing here imports torch."""
