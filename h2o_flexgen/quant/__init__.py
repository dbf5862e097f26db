"""How values are stored: codecs, one file each."""
