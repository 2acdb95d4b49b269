"""Mistakes of a model's parts that `debug.check` finds without running it, and what it must not take for one."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext import debug

pytestmark = pytest.mark.core


class Block(nn.Module):
    """As users write it; dropouts at each place."""

    def __init__(self, group, between=None, after=None, sp=(False, False), **options):
        super().__init__()
        self.before = nn.Dropout(0.1)
        self.up = tp_ext.ColumnParallelLinear(4, 6, group=group, sequence_parallel=sp[0], **options)
        self.act = nn.GELU()
        if between is not None:
            self.between = between
        self.down = tp_ext.RowParallelLinear(6, 4, group=group, sequence_parallel=sp[1])
        if after is not None:
            self.after = after


def _models(group):
    options = {"group": group}
    column, row = tp_ext.ColumnParallelLinear(4, 6, **options), tp_ext.RowParallelLinear(6, 4, **options)
    return {
        "between": Block(group, nn.Dropout(0.1)),
        "sequential": nn.Sequential(nn.Sequential(column, nn.ReLU(), nn.Dropout1d(0.2), row)),
        "row only": Block(group, sp=(False, True)),
        "column only": Block(group, sp=(True, False)),
        # Nothing is wrong with these
        "after": Block(group, None, nn.Dropout(0.1)),
        "never drops": Block(group, nn.Dropout(0.0)),
        "ours": Block(group, tp_ext.Dropout(0.1, group=group)),
        "gathered": Block(group, nn.Dropout(0.1), gather_output=True),
        "unsharded": Block(None, nn.Dropout(0.1), sp=(True, False)),
        "both": Block(group, sp=(True, True)),
        "another": nn.Sequential(Block(group, sp=(True, True)), tp_ext.ColumnParallelLinear(4, 4, group=group)),
        "attention": tp_ext.ParallelAttention(4, 4, qk_norm=True, **options),
        "head outside": nn.Sequential(
            tp_ext.ParallelMLP(4, 8, sequence_parallel=True, **options), tp_ext.VocabParallelLMHead(4, 8, **options)
        ),
    }


def _found(group):
    return {name: debug.findings(model, group=group) for name, model in _models(group).items()}


def test_broken_rules_are_found_and_valid_models_pass():
    for found in ranks.run(_found, 2):
        wrong = {name: sentences for name, sentences in found.items() if sentences}
        assert list(wrong) == ["between", "sequential", "row only", "column only"]
        assert all(len(sentences) == 1 for sentences in wrong.values())
        assert wrong["between"][0].startswith("between: torch's dropout between column linear up and row linear down")
        assert wrong["sequential"][0].startswith("0.2: torch's dropout between column linear 0 and row linear 3")
        assert wrong["row only"][0].startswith("up: sequence_parallel=False must be that of the row linear down, True")
        assert wrong["column only"][0].startswith(
            "up: sequence_parallel=True must be that of the row linear down, False"
        )
    assert not any(ranks.run(_found, 1)[0].values())


def _optimizers(group):
    model = nn.Sequential(nn.Linear(4, 4), tp_ext.ParallelMLP(4, 8, group=group))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0] = tp_ext.RowParallelLinear.from_linear(model[0], group=group, input_is_parallel=False)
    late = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].up.weight}])
    debug.check(model, optimizer=late)
    return debug.findings(model, optimizer=early)


def test_an_optimizer_made_too_early():
    for (found,) in ranks.run(_optimizers, 2):
        assert found.startswith("optimizer: 2 of its 6 parameters, of shapes (4, 4), (4,), are not the model's")
    assert len(ranks.run(_optimizers, 1)[0]) == 1


@on_ranks(2, backend="gloo")
def test_what_has_other_bits_for_another_number_of_ranks(group):
    with tp_ext.tp_invariant():
        activated, mlp = Block(group), tp_ext.ParallelMLP(4, 8, group=group)
    mixed = nn.Sequential(mlp, tp_ext.RMSNorm(4, group=group), tp_ext.ParallelMLP(4, 8, group=group))
    found = {
        name: debug.findings(model, group=group) for name, model in (("act", activated), ("mixed", mixed), ("", mlp))
    }
    assert found["act"][0].startswith("act: nn.GELU must not be between linears built in tp_invariant")
    (sentence,) = found["mixed"]
    assert sentence.startswith("1: must be built in tp_invariant, as 0: ") and "3 more layers" in sentence
    assert not found[""]
