"""Ranks on processes for tests of sharded models: `run` and `run_raises` as those of `ranks`, where rank 0 alone makes
a plan of ``auto.plan`` and sends it: it is the same on all ranks, and costs seconds on each.

A plan of a model of transformers, which depends on its code and not on its weights, is made once in a run of pytest.
"""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import ranks
from tp_ext import auto


def run(fn: Callable, p: int, *args: Any, timeout: float = 60, **kwargs: Any) -> list:
    """The results of fn(group, *args, **kwargs) on ranks 0..p-1; each plan is made once."""
    return ranks.run(_with_plans_of_rank_0, p, fn, args, kwargs, timeout=timeout)


def run_raises(fn: Callable, p: int, exception: Any, match: str, *args: Any, **kwargs: Any) -> None:
    """Asserts as ``ranks.run_raises``, all ranks at once, that fn raises the same on every rank."""
    ranks.run_raises(_with_plans_of_rank_0, p, exception, match, fn, args, kwargs, in_turns=False)


def _with_plans_of_rank_0(group: Any, fn: Callable, args: tuple, kwargs: dict) -> Any:
    plan = auto.plan

    def planned(*args: Any, **kwargs: Any) -> auto.Plan:
        made = [kept(plan, *args, **kwargs) if dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(made, src=0, group=group)
        return made[0]

    with mock.patch.object(auto, "plan", planned):
        return fn(group, *args, **kwargs)


def kept(plan: Callable[..., auto.Plan], model: nn.Module, *args: Any, **kwargs: Any) -> auto.Plan:
    """A plan of a model, from the folder of this run if it has one of the same model and arguments."""
    text = "" if not hasattr(model, "config") else _text(model, args, kwargs)
    if not text or " at 0x" in text or ranks.PLANS not in os.environ:  # of an object that may be another one
        return plan(model, *args, **kwargs)
    file = Path(os.environ[ranks.PLANS]) / hashlib.sha256(text.encode()).hexdigest()
    if not file.exists():
        own = file.with_name(f"{file.name}.{os.getpid()}")
        own.write_bytes(pickle.dumps(plan(model, *args, **kwargs)))
        own.rename(file)  # whole, for other processes
    result: auto.Plan = pickle.loads(file.read_bytes())
    return result


def _text(model: Any, args: tuple, kwargs: dict) -> str:
    """All that the code of a model can see but the values of its tensors."""
    config, plain = model.config, (bool, int, float, str, type(None), torch.dtype)
    modules = [
        (name, type(module), [item for item in vars(module).items() if isinstance(item[1], plain)])
        for name, module in model.named_modules()
    ]
    numbers: dict[int, int] = {}  # tied tensors have one
    tensors = [
        (name, numbers.setdefault(id(t), len(numbers)), t.shape, t.dtype, t.device, t.requires_grad, vars(t))
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    ]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    state = torch.get_default_dtype(), torch.float32, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    own = {key: value for key, value in vars(config).items() if isinstance(value, plain)}
    return repr((config.to_json_string(use_diff=False), own, modules, tensors, hooks, state, args, kwargs))
