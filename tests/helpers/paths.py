"""Folders of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
