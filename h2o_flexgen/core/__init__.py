"""What every room speaks of: sizes, texts for people, files; nothing here imports torch."""
