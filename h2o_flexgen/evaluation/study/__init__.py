"""What attention does with a text, and which tokens the policies keep: the statistics that H2O rests on, for any model."""
