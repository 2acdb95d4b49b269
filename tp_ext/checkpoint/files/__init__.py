"""Files of checkpoints: atomic and exclusive writes, checksums, reading."""
