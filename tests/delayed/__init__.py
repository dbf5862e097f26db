"""A GPU whose lanes are late at random, so that what does not wait is early by milliseconds."""
