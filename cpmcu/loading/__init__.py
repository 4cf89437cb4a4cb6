"""From a model's name to an engine with its weights in place."""
