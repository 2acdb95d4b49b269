"""State of models and optimizers: full and sharded state dicts, checkpoints, safetensors files."""
