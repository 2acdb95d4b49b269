"""The plan of one rank: what it does at every number of ranks, without shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from tp_ext.auto.record.edits import Draw
from tp_ext.auto.search.plans import Plan
from tp_ext.sharding import Sharding


def for_one_rank(plan: Plan, modules: Mapping[str, nn.Module]) -> Plan:
    """Returns the plan of one rank: its linear layers are replaced as by ``plan``, so that adapters fit them, its
    attention and its random calls, so that masks are the same numbers; every shard is whole."""
    roles = {n: role for n, role in plan.roles.items() if role == "attention" or isinstance(modules[n], nn.Linear)}
    shardings = {
        name: Sharding(sharding.dim, [replace(part, copies=1, groups=1) for part in sharding.parts])
        for name, sharding in plan.shardings.items()
        if name.rpartition(".")[0] in roles
    }
    return replace(
        plan,
        p=1,
        shardings=shardings,
        tied=[],
        roles=roles,
        heads=[],
        buffers={},
        copies=[],
        sums=[],
        slices=[],
        gathers=[],
        refused_inputs=[],
        draws=whole_draws(plan.draws),
        patches={},
        sizes={},
        whole={name: "p = 1" for name in plan.shapes if name not in shardings},
        collectives=[],
        proofs=[],
        outputs=[replace(output, local=output.shape, state="replicated") for output in plan.outputs],
        tokens=[],
        whole_tokens={},
    )


def whole_draws(draws: list[Draw]) -> list[Draw]:
    """The draws of replicated tensors in place of those of shards: one of each kind of call of a module."""
    always = {draw.module for draw in draws if draw.always}
    found = {(draw.module, draw.call): Draw(draw.module, draw.call, always=draw.module in always) for draw in draws}
    return list(found.values())
