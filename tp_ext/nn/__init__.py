"""Layers, and the functions that they consist of. They use a group of ranks, never a mesh."""
