"""Copies of sharded models whose modules say themselves how they are copied or pickled."""

import copy
import copyreg
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_gradients
from tests.helpers.simulated import run
from tp_ext import auto

WIDTH, VOCAB = 16, 40
close = {"rtol": 1e-11, "atol": 1e-12}  # ranks sum in another order


class Move(nn.Module):
    """As a layer of einops: without parameters. A hook completes a gradient here."""

    def __init__(self, dims: tuple[int, int] = (1, 2)) -> None:
        super().__init__()
        self.arguments = (dims,)

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.arguments[0])


class Table(nn.Embedding):
    """A table whose class is changed to look up rows of all ranks."""

    def __init__(self, rows: int = VOCAB, width: int = WIDTH) -> None:
        super().__init__(rows, width)
        self.arguments = rows, width


class Heads(nn.Module):
    """Attention whose number of heads is set to those of a rank."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.arguments, self.heads = (heads,), heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class Sizes(Heads):
    """Attention that writes sizes as numbers, so that its forward in the instance changes them."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class Weights(nn.Module):
    """A gated block with weights of its own, and a norm before it in one forward, and dropout."""

    def __init__(self, width: int = 36) -> None:
        super().__init__()
        self.arguments = (width,)
        self.up, self.down = nn.Parameter(torch.randn(width, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, width) / 6)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.dropout(F.gelu(F.linear(x, self.up)), 0.3, self.training), self.down, self.bias)


class Residual(nn.Module):
    """A module with modules inside: its own way of copying decides about theirs."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.arguments, self.inner, self.norm = inner, nn.Sequential(*inner), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def _state(self: Any) -> dict[str, Any]:
    return {"arguments": self.arguments, "parameters": self._parameters, "modules": self._modules}


def _set(self: Any, state: dict[str, Any]) -> None:
    type(self).__init__(self, *state["arguments"])
    self._parameters.update(state["parameters"])
    self._modules.update(state["modules"])


def _reduce(self: Any) -> Any:
    return _filled, (type(self), self.arguments, dict(self._parameters), dict(self._modules))


def _filled(cls: Any, arguments: Any, parameters: Any, modules: Any) -> nn.Module:
    module = cls(*arguments)
    _set(module, {"arguments": arguments, "parameters": parameters, "modules": modules})
    return module


def _deepcopy(self: Any, memo: dict[int, Any]) -> nn.Module:
    return _filled(type(self), *copy.deepcopy((self.arguments, self._parameters, self._modules), memo))


def _copy(self: Any) -> nn.Module:
    return _filled(type(self), self.arguments, self._parameters, self._modules)


PROTOCOLS: dict[str, dict[str, Any]] = {
    "state": {"__getstate__": _state, "__setstate__": _set},
    "reduce": {"__reduce__": _reduce},
    "reduce_ex": {"__reduce_ex__": lambda self, protocol: _reduce(self)},
    "deepcopy": {"__deepcopy__": _deepcopy, "__copy__": _copy},
    "registered": {},
}
for _name, _methods in PROTOCOLS.items():
    for _base in (Move, Table, Heads, Sizes, Weights, Residual):
        _made = f"{_base.__name__}_{_name}"
        globals()[_made] = type(_made, (_base,), {"__module__": __name__, "__qualname__": _made, **_methods})
        if _name == "registered":
            copyreg.pickle(globals()[_made], _reduce)


class Model(nn.Module):
    """A model of modules that are copied in one way; the attention with sizes is called by name, too."""

    def __init__(self, protocol: str) -> None:
        super().__init__()
        make = {
            base: globals()[f"{base}_{protocol}"] for base in ("Move", "Table", "Heads", "Sizes", "Weights", "Residual")
        }
        self.table = make["Table"]()
        self.convolutions = nn.Sequential(
            make["Move"](), nn.Conv1d(WIDTH, 32, 1), nn.ReLU(), nn.Conv1d(32, WIDTH, 1), make["Move"]()
        )
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(make["Residual"](make[name]()) for name in ("Heads", "Sizes", "Weights")))
        self.called, self.head = make["Heads"](), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.blocks(x + self.convolutions(self.norm(x)))
        return self.head(self.called.forward(self.last(x)))


def _through(write: Callable[[Any, Any], None], read: Callable[[Any], Any]) -> Callable[[nn.Module], nn.Module]:
    def copied(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        write(model, file)
        file.seek(0)
        return read(file)

    return copied


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "average": AveragedModel,
    "save": _through(torch.save, lambda file: torch.load(file, weights_only=False)),
    "pickle": _through(pickle.dump, pickle.load),
    "copy": copy.copy,
    "copies of modules": lambda model: _with_copied_modules(model),  # the last: it changes the model
}
IDS = torch.arange(15).reshape(3, 5) * 7 % VOCAB


def _with_copied_modules(model: nn.Module) -> nn.Module:
    for name, module in model.named_children():
        if not isinstance(module, nn.Sequential):
            setattr(model, name, copy.copy(module))
    return model


@functools.cache
def _plan() -> auto.Plan:
    return auto.plan(Model("state").double(), (IDS,), 2)  # the protocol is no part of it


def _trains_as(dense: nn.Module, model: nn.Module) -> None:
    # These ways of copying do not keep the mode
    expected, result = dense.eval()(IDS), model.eval()(IDS)
    torch.testing.assert_close(result, expected, **close)
    for logits in (expected, result):
        F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
    same_gradients(dense, getattr(model, "module", model), **close)


def _are_the_model(group: Any, protocol: str) -> list[str]:
    torch.manual_seed(0)
    dense = Model(protocol).double()
    sharded = auto.apply(_plan(), copy.deepcopy(dense), group)
    of_users = [module for module in sharded.modules() if type(module).__name__.endswith(f"_{protocol}")]
    hooks = [*(h for m in of_users for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))]
    edits = [edit for hook in hooks for edit in getattr(hook, "edits", ())]
    kinds = {type(edit).__name__ for edit in (*edits, *(vars(module).get("forward") for module in of_users))}
    assert sharded.blocks[0].inner[0].heads == 2 and sharded.blocks[0].inner[0].arguments == (4,)
    for copied in COPIES.values():
        for model in (dense, sharded):
            model.zero_grad(set_to_none=True)
        _trains_as(dense, copied(sharded))
    return sorted(kinds)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_copies_of_a_sharded_model_are_the_model(protocol: str) -> None:
    (kinds, _) = run(_are_the_model, 2, protocol)
    # All kinds of edits are on modules that say themselves how they are copied
    edits = {"ConvertedOutput", "SizedForward", "CalledForward", "EnteredParameters", "PlannedDraws"}
    assert edits <= set(kinds), kinds


def _in_another_process(model: nn.Module) -> nn.Module:
    pickled, numbers = pickle.dumps(model), RemovableHandle.next_id
    RemovableHandle.next_id = 0
    model = pickle.loads(pickled)
    # A hook of a user would get such a number next, and replace what has it
    assert RemovableHandle.next_id > max(i for m in model.modules() for i in (*m._forward_hooks, *m._forward_pre_hooks))
    RemovableHandle.next_id = max(numbers, RemovableHandle.next_id)
    return model


def _with_adapters(model: nn.Module) -> nn.Module:
    tp_ext.add_lora(model, targets=["qkv", "out"], r=2, alpha=4.0, freeze=False)
    return model


def _merged(model: nn.Module) -> nn.Module:
    tp_ext.merge_lora(_with_adapters(model))
    return model.requires_grad_()


def _with_wrappers(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def _are_the_model_still(group: Any, changes: list[Callable[[nn.Module], nn.Module]]) -> None:
    torch.manual_seed(0)
    dense = Model("state").double()
    sharded = auto.apply(_plan(), copy.deepcopy(dense), group)
    for change in changes:
        copied = change(copy.deepcopy(sharded))
        expected, logits = dense.eval()(IDS), copied.eval()(IDS)
        torch.testing.assert_close(logits, expected, **close)
        dense.zero_grad(set_to_none=True)
        for y in (expected, logits):
            y.square().sum().backward()
        # Names have changed. The first norm is before all edits
        torch.testing.assert_close(copied.norm.weight.grad, dense.norm.weight.grad, **close)


def test_a_copy_may_change_before_its_first_call() -> None:
    run(_are_the_model_still, 2, [_in_another_process, _with_adapters, _merged, _with_wrappers])


class Rebuilt(Residual):
    """A module whose copies have new modules inside, without edits."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = Rebuilt(Weights())
        for name, parameter in self.named_parameters():
            owner, _, attribute = name.rpartition(".")
            copied.get_submodule(owner)._parameters[attribute] = copy.deepcopy(parameter, memo)
        return copied


class InParts(nn.Module):
    """A module that copies its modules one by one: they no longer know of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weights(), nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = InParts()
        copied.first, copied.second = copy.deepcopy(self.first), copy.deepcopy(self.second)
        return copied


def _refused(group: Any, name: str) -> str:
    change, make, _ = REFUSED[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(make(), nn.Linear(WIDTH, WIDTH)), torch.randn(3, WIDTH)
    model = auto.apply(auto.plan(model, (x,), 2), model, group)
    model(x)
    try:
        change(model)(x)
    except RuntimeError as error:
        return str(error)
    return ""


def _cleared(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if module is not model:
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    return model


def _with_its_class(model: nn.Module) -> nn.Module:
    model[0].inner[0].__class__ = Weights
    return model


def _replica(model: nn.Module) -> nn.Module:
    return model._replicate_for_data_parallel()


REFUSED: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[], nn.Module], str]] = {
    "hooks are cleared": (_cleared, lambda: Residual(Weights()), "was removed from one of its modules"),
    "after a copy": (lambda m: _cleared(copy.deepcopy(m)), lambda: Residual(Weights()), "a copy that lacks"),
    "in a copy of what was cleared": (lambda m: copy.deepcopy(_cleared(m)), lambda: Residual(Weights()), "was removed"),
    "rebuilt": (copy.deepcopy, lambda: Rebuilt(Weights()), "a copy that lacks"),
    "one by one": (copy.deepcopy, InParts, "copied one by one"),
    "the class": (_with_its_class, lambda: Residual(Weights()), "class of a module was set to Weights"),
    "replicas": (_replica, lambda: Residual(Weights()), "must not be replicated by nn.DataParallel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_its_edits_is_refused(name: str) -> None:
    for error in run(_refused, 2, name):
        assert REFUSED[name][2] in error


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids)))


def _assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


def _with_memory(model: nn.Module) -> nn.Module:
    state = tp_ext.full_state_dict(model)
    model = model.to("meta")
    model.table.weight = model.head.weight
    model.to_empty(device="cpu")
    tp_ext.load_full_state_dict(model, state)
    return model


def _untied(model: nn.Module) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _tied_again(model: nn.Module) -> nn.Module:
    model.head.weight = _assigned(model).table.weight
    return model


TIED: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "deepcopy": (copy.deepcopy, True),
    "save": (COPIES["save"], True),
    "average": (COPIES["average"], True),
    "to": (lambda model: model.half().double(), True),
    "tied again": (_tied_again, True),
    "assign": (_assigned, False),
    "assigned copy": (lambda model: _assigned(copy.deepcopy(model)), False),
    "to_empty": (_with_memory, False),
    "untied": (_untied, False),
}


@on_ranks(2)
def test_tied_parameters_stay_tied_or_are_refused(group: Any) -> None:
    plan = auto.plan(Tied().double(), (IDS,), 2)
    assert set(plan.shardings) >= {"table.weight", "head.weight"}
    for change, stays in TIED.values():
        model = auto.apply(plan, Tied().double(), group)
        model(IDS)
        changed = change(model)
        if stays:
            changed(IDS)
            inner = getattr(changed, "module", changed)
            assert inner.head.weight is inner.table.weight
        else:
            with pytest.raises(RuntimeError, match=r"table.weight and head.weight were one parameter"):
                changed(IDS)
