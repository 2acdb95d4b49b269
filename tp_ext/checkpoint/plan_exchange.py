"""Agreement of all ranks on the plan of a save. A plan that is the last one on every rank is not sent again."""

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tp_ext._object_collectives import attempt, call_and_combine, is_alive, true_on_any_rank
from tp_ext.checkpoint.save_plan import GlobalPlan, RankPlan
from tp_ext.common_generator import device_of

_MAX_KEPT = 100_000  # entries of all ranks, which the first one keeps between saves: 110 MB


class _Agreed(NamedTuple):
    """The outcome of the last exchange over a group; all ranks of the group have one or none has."""

    group: ProcessGroup | None
    own: RankPlan
    assigned: list[int]
    plans: list[RankPlan]  # on the first rank, else empty
    whole: GlobalPlan | None


_last: dict[str, _Agreed] = {}  # by the name of the group


def exchange_plans(
    process_group: ProcessGroup | None, prepare: Callable[[], RankPlan]
) -> tuple[list[int], GlobalPlan | None]:
    """Calls ``prepare`` on all ranks for their plans; returns the indices of the entries that this rank writes, and on
    the first rank the plan of all.

    Communicates: one all-reduce of a number; where a plan is another one than at the last call, one gather and one
    scatter of objects, of such plans.

    Raises:
        ValueError: see :class:`GlobalPlan`. Any error of ``prepare``, on every rank.
    """
    # Plans belong to a group: its ranks, and no others, have agreed on them
    group = (process_group or dist.group.WORLD) if dist.is_initialized() else None
    name = "" if group is None else group.group_name
    # The name of a destroyed group may come again, for other ranks
    for destroyed in [known for known, agreed in _last.items() if not is_alive(agreed.group)]:
        del _last[destroyed]
    last = _last.pop(name, None)  # put back below if all has gone well: after an error plans are exchanged anew
    combined: list[tuple[list[RankPlan], GlobalPlan]] = []
    failure, (_, plan) = attempt(prepare)  # the other ranks must not wait
    changed = last is None or plan != last.own
    # By the values of all: a rank that exchanges plans while another does not would wait for it
    if group is None:
        exchanged = changed or process_group is not None  # which was destroyed: an error below
    else:
        exchanged = true_on_any_rank(changed, [group], device_of(group))
    if not exchanged:
        assert last is not None
        _last[name] = last
        return last.assigned, last.whole

    def act() -> RankPlan | None:
        if failure is not None:
            raise failure
        return plan if changed else None

    def combine(found: list[RankPlan | None]) -> list[tuple[list[int], bool]]:
        # None of a rank: its plan is that of the last call, which the first rank has kept
        plans = [last.plans[rank] if plan is None and last else plan for rank, plan in enumerate(found)]
        known = [plan for plan in plans if plan is not None]
        combined.append((known, GlobalPlan(known)))
        kept = sum(len(plan.entries) for plan in known) <= _MAX_KEPT
        return [(indices, kept) for indices in combined[0][1].assigned]

    assigned, kept = call_and_combine(process_group, act, combine)
    plans, whole = combined[0] if combined else ([], None)
    # combine has decided it for all: a rank that kept nothing would send its plan and others not
    if kept:
        assert plan is not None
        _last[name] = _Agreed(group, plan, assigned, plans, whole)
    return assigned, whole
