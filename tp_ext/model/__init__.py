"""What a model of ours is: modules, layouts of their parameters, names, stages, tied weights, groups."""
