"""Two gloo ranks that share a GPU: every module and a training against one process, in fp64 (regions: test_regions.py).

On the CPU the same bodies run, too: what fails on a GPU alone is the GPU's.
"""

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.makers import CASES, assert_parity, build, caller, gathered, outcome
from tests.helpers.oracle import gradients
from tests.helpers.small_gpt import batches
from tests.helpers.small_gpt import make as make_gpt

pytestmark = pytest.mark.core

SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
P = 2


def step(group, name, sp, device):
    """makers.step with the module on the device: y, dx and the gradients of one rank."""
    module = build(name, group, sp).to(device)
    call = caller(name, module)
    y, dx, *_ = outcome(name, module, group, sp, lambda x: call(x.to(device)).cpu())
    return y, dx, gradients(module)


@SP
@pytest.mark.parametrize("name", CASES)
def test_every_module_is_the_unsharded_one(name, sp, device):
    """The oracle is the CPU's; with dropout that of the device, whose generator draws other seeds."""
    oracle = device if CASES[name].dropout else torch.device("cpu")
    want = gathered(name, sp, [step(None, name, sp, oracle)])
    want = {key: value if value is None else value.cpu() for key, value in want.items()}
    assert_parity(step, name, P, sp, want, 1e-12, device)


def train(group, sp, device):
    """Losses and gradient norms of ten steps, and the full state after them."""
    model = make_gpt(group, sequence_parallel=sp).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = []
    torch.manual_seed(3)
    for ids, target in batches(10):
        loss = model.loss(ids.to(device), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        numbers += [loss.item(), tp_ext.clip_grad_norm_(model, 1.0, group=group).item()]
        optimizer.step()
    return torch.tensor(numbers), tp_ext.full_state_dict(model, group=group)


@SP
def test_training_is_that_of_one_process(sp, device):
    """fp64 and another order of sums: 1e-9 as in test_training.py, dropout included."""
    numbers, state = train(None, sp, device)
    for got, full in ranks.run(train, P, sp, device, timeout=120):
        torch.testing.assert_close(got, numbers, rtol=1e-9, atol=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(full[name], value.cpu(), rtol=1e-7, atol=1e-9)
