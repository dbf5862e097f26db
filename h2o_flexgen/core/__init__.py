"""The nouns that every room uses: sizes, texts for people, files. Nothing here imports torch."""
