"""Functions of a whole model over its ranks: gradient norm, and what must not wrap the model."""
