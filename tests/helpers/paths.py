"""Folders of the repository, and programs of the machine."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
# Before a compiler's name: what it has compiled in an earlier run is copied, where there is the program
CCACHE = [name for name in ("ccache",) if shutil.which(name)]
