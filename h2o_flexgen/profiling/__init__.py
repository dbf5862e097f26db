"""Everything that measures a machine."""
