"""From a model to its hidden dimensions: trace, track axes, survey."""
