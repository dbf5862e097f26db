"""What attention does with a text, and whom the policies keep of it: the statistics that H2O rests on, for any model."""
