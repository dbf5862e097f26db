"""What commands say of a plan, a search and a run."""
