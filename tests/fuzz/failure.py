"""A failure of a fuzzer: how it is printed, and how it is made smaller."""

import time
from dataclasses import dataclass


@dataclass
class Failure:
    """A configuration on p ranks and the differences found. ``python -m <module> --config`` repeats it."""

    config: dict
    wrong: list[str]
    p: int
    module: str

    @property
    def kind(self):
        """The property that a smaller failure must share: the type of the exception, or a difference."""
        return self.wrong[0].split("\n")[0].split(": ")[-1] if self.wrong[0].startswith("rank ") else "difference"

    def __str__(self):
        lines = [line for text in self.wrong[:6] for line in text.strip().split("\n")[-12:]]
        config, text = self.config, "\n  ".join(lines)
        return f'seed {config["seed"]}, p = {self.p}:\n  {text}\npython -m {self.module} --config "{config}"'


def reduced(failure, simpler, fails, deadline):
    """Returns the simplest failure of the same kind that is found until the deadline.

    Args:
        simpler: config -> configurations one option simpler.
        fails: config -> its failure, or None.
    """
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for config in simpler(failure.config):
            smaller = fails(config)
            if smaller is not None and smaller.kind == failure.kind:
                failure, progress = smaller, True
                break
            if time.monotonic() > deadline:
                break
    return failure
