"""A GPU whose lanes are late at random, so that whoever does not wait is early by milliseconds."""
