"""What is asked of a completion, how its tokens are picked, and what comes out."""
