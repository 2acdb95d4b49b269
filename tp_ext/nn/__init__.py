"""Layers, and the functions that they are made of. They know a group of ranks, never a mesh."""
