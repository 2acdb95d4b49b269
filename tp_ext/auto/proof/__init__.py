"""The proof of a plan by values."""
