"""The error of a replica that has lost a rank."""


class ReplicaLost(RuntimeError):  # noqa: N818, a state of the job more than a mistake
    """This replica takes no part any more: one of its ranks died, or the others have not heard of it for too long.

    Its processes end, and may start again as a new replica, also under the same name.

    Attributes:
        replica: its name.
    """

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(f"replica: {replica!r} was lost: {reason}; its processes must end, and may join again")
        self.replica = replica
