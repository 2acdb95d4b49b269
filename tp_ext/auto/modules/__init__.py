"""What a plan places into a model: hooks, layers in place of leaves, sharded logits, random draws."""
