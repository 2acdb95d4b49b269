"""Attention, its positions and caches."""
