"""Cost of a model: parameters, multiply-adds, memory, attention matrices."""
