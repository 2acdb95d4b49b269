"""Every class of torch.optim, saved on two ranks, goes on at other numbers; its groups have options of others."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import nn

import tp_ext
from tp_ext.debug import simulate

# Those of this version of torch, by their names
CLASSES = [
    kind
    for _, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
# These compute with whole tensors, and are refused for shards: they train the replicated layer
OF_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
FOREIGN = {
    "nothing": {},
    "weight decay": {"weight_decay": 0.25},
    "of all classes": {
        "momentum": 0.5,
        "alpha": 0.5,
        "lr_decay": 0.125,
        "rho": 0.5,
        "etas": (0.25, 2.0),
        "max_iter": 3,
    },
    "of nobody": {"lr_scale": 0.5, "name": "decayed", "is_first": True, "nothing": None},
}


class _Net(nn.Module):
    def __init__(self, group, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(3, 6, sparse=True)
        self.mlp, self.last = tp_ext.ParallelMLP(6, 8, group=group), nn.Linear(6, 6)
        self.double()

    def step(self, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = self.last(self.mlp(self.table(torch.arange(3)))).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return {name: value.clone() for name, value in tp_ext.full_state_dict(self).items()}


def _optimizer_of(kind, model, foreign):
    params = [*model.mlp.parameters(), *model.last.parameters()]
    if kind.__name__ in OF_WHOLE_TENSORS:
        params = [model.table.weight] if kind.__name__ == "SparseAdam" else list(model.last.parameters())
    params = [param for param in params if param.dim() == 2 or kind.__name__ != "Muon"]
    for param in model.parameters():
        param.requires_grad_(any(param is other for other in params))
    options = {"momentum": 0.9} if kind.__name__ == "SGD" else {}
    if kind.__name__ == "LBFGS":  # of one group
        return kind(params, lr=0.0625, max_iter=2)
    groups = [{"params": params[:1], **foreign}, {"params": params[1:]}]
    return kind(groups[: len(params)], lr=0.0625, **options)


def _rows():
    """All pairs; by default each class with options that other classes have, in turn with the others, and with all the
    class that has the fewest options."""
    for i, kind in enumerate(CLASSES):
        for j, foreign in enumerate(FOREIGN):
            few = foreign == "of all classes" or i % len(FOREIGN) == j or kind.__name__ == "SparseAdam"
            marks = [] if few else pytest.mark.exhaustive
            yield pytest.param(kind, foreign, id=f"{kind.__name__}-{foreign}", marks=marks)


@pytest.mark.parametrize(("kind", "foreign"), _rows())
def test_every_optimizer_of_torch_goes_on_at_any_number_of_ranks(kind, foreign, tmp_path):
    options = FOREIGN[foreign]

    def save(rank, group):
        model = _Net(group, 0)
        optimizer = _optimizer_of(kind, model, options)
        for _ in range(2):
            model.step(optimizer)
        tp_ext.save_checkpoint(tmp_path / "saved", model, optimizer)
        full = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)
        return copy.deepcopy(full), model.step(optimizer)

    def load(rank, group, full, live):
        model = _Net(group, 1)
        optimizer = _optimizer_of(kind, model, options if live else {})
        if full is None:
            tp_ext.load_checkpoint(tmp_path / "saved", model, optimizer)
        else:
            tp_ext.load_full_state_dict(model, full[0])
            tp_ext.load_full_optimizer_state_dict(model, optimizer, full[1])
        assert optimizer.param_groups[0].items() >= options.items()
        return model.step(optimizer)

    if kind.__name__ == "LBFGS":  # its directions are lists of tensors of all parameters
        with pytest.raises(RuntimeError, match=r"state 'old_dirs' of 'last.weight', a list, must be a tensor"):
            simulate(save, 2)
        return
    full, expected = simulate(save, 2)[0]
    # Without the user's own options, weight_decay makes another class of SparseAdam
    ambiguous = kind.__name__ == "SparseAdam" and foreign == "weight decay"
    for p, state, live in itertools.product((1, 3), (None, full), (True,) if ambiguous else (True, False)):
        for got in simulate(load, p, state, live):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
