"""Memory of a process."""

from pathlib import Path


def high_water(reset: bool = False) -> int:
    """Returns the KiB of the largest resident set since the last reset; with ``reset`` of the present one."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(one.split()[1] for one in lines if one.startswith("VmHWM")))
