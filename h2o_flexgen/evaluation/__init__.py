"""How good a model still is under a plan: what its texts are worth, measured."""
