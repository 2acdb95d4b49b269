"""A small model and its optimizer of which every number says which step it is of, for tests of checkpoints."""

import torch
from torch import nn

import tp_ext


def build(group):
    layers = tp_ext.ColumnParallelLinear(24, 32, group=group), tp_ext.RowParallelLinear(32, 24, group=group)
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fill(model, optimizer, step):
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
            optimizer.state[param] = {name: torch.full_like(param, step) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param]["step"] = torch.tensor(float(step))
    optimizer.param_groups[0]["lr"] = float(step)
