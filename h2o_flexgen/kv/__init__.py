"""The KV cache: its slots, and the policies that say which of them are kept."""
