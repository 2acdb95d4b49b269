"""Functions of a whole model over its ranks: gradient norm, and the guard against data parallelism over TP ranks."""
