"""torch.manual_seed at a hundredth of its cost on a machine without a GPU."""

import torch


def cheapen() -> None:
    """Without a device, its module keeps each call, and a traceback, for the time when there is one: 1 ms each."""
    if not torch.cuda.is_available():
        for module in (torch.cuda, torch.mtia, torch.xpu):
            module.manual_seed_all = lambda seed: None
