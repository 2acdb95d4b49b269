"""Progress of planning, on a terminal: the step that runs and the seconds since the begin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

DELAY = 2.0  # seconds of planning before anything is shown

_bar: ContextVar[Any] = ContextVar("bar", default=None)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Shows the steps of a planning in the block on standard error, if that is a terminal, on one rank of a host."""
    if _bar.get() is not None:  # a plan inside of a plan
        yield
        return
    disable = None if os.environ.get("LOCAL_RANK", "0") == "0" else True
    with tqdm(desc="auto.plan", bar_format="{desc} [{elapsed}]", delay=DELAY, disable=disable, leave=False) as bar:
        token = _bar.set(bar)
        try:
            yield
        finally:
            _bar.reset(token)


def step(text: str) -> None:
    """Names the step that runs next."""
    bar = _bar.get()
    if bar is not None:
        bar.set_description_str(f"auto.plan: {text}")
