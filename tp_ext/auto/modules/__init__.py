"""Modules and hooks that a plan puts into a model: sharded layers, sharded logits, random draws."""
