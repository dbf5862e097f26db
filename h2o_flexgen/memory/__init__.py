"""Memory: tiers (device, host, disk), one file each, and Pack, the buffer with named views that is moved between
them."""
