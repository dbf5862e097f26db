"""The server: requests over HTTP as OpenAI has them, gathered into blocks that one thread computes."""
