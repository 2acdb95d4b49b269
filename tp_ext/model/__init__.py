"""The description of a model: the base class of layers, layouts of parameters, names, stages, tied weights, groups."""
