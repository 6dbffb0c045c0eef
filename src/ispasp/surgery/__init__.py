"""Surgery: applies a plan to a model."""
