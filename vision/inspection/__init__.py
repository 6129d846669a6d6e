"""Where a model looks: attention from the forward pass itself, and what can be derived from it."""
