"""The context of a step of ``tp_ext.parallel.ElasticData``."""

from collections.abc import Callable
from types import TracebackType
from typing import Self


class StepContext:
    """The context of a step, in which an error ends this replica's part in it.

    Args:
        leave: leaves the other replicas, and returns the error to raise.
    """

    def __init__(self, leave: Callable[[BaseException], BaseException]) -> None:
        self._leave = leave

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        raised = self._leave(error)
        if raised is not error:
            raise raised from error
