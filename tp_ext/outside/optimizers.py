"""A guard against optimizers whose update of an element depends on other elements of the tensor: on a shard they
compute another update than on the full tensor, without an error, and training depends on the number of ranks.

Importing tp_ext registers one global hook of ``torch.optim`` (:func:`refuse_on_shards`), which looks at each optimizer
in its first step; afterwards it costs one lookup a step. Whether updates are elementwise is found by running a copy of
the optimizer on small tensors and on their halves (:func:`runs_elementwise`). Of parameters with blocks of
:func:`tp_ext.tp_invariant`, on one rank too, the bits must not depend on where a shard ends (:func:`has_same_bits`).
"""

import copy
import functools
import inspect
import itertools
import math
import random
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tp_ext._checks import check_type
from tp_ext.model.census import Census
from tp_ext.outside.live_shards import Replaced, layouts_by_id
from tp_ext.sharding import Layout

_FAMILIES = re.compile(r"lbfgs|muon|adafactor|lamb(?!da)|lars|shampoo|soap|prodigy|dadapt", re.IGNORECASE)
# Even sides, to be halved. The last for what keeps sums of rows and columns of large matrices, from 8 to 128 on
_SHAPES = ((4, 6), (6, 4), (160, 144))
_BIT_SHAPE, _BIT_CUTS = (40, 331), ((0, 1, 6, 40), (0, 5, 16, 331))  # vectors and remainders of all lengths
_BIT_STEPS = 8  # more than RAdam's first five, which it computes otherwise
_MAX_COPIED = 1 << 20  # elements of tensors that a copy of an optimizer may have
# With Replaced.count and the numbers of their step hooks then; None: accepted, with any
_checked: "weakref.WeakKeyDictionary[Optimizer, tuple[int, ...] | None]" = weakref.WeakKeyDictionary()
_verdicts: dict[tuple[str, str, str, bool], bool | None] = {}
_functions = itertools.count()


def accept(optimizer: Optimizer) -> Optimizer:
    """Lets an optimizer update shards that :func:`refuse_on_shards` would refuse, because one knows better; returns it.

    For an optimizer that looks beyond single elements in a way that is right on shards: along a dim that no rank
        shards, or with sums over the ranks of its own.

    Raises:
        TypeError: ``optimizer`` is of another type.
    """
    check_type(Optimizer, "a torch.optim.Optimizer", optimizer=optimizer)
    _checked[optimizer] = None
    return optimizer


def accepts_shards(value: object) -> bool:
    """Returns whether the value is an optimizer that :func:`accept` was given."""
    return isinstance(value, Optimizer) and _checked.get(value, ()) is None


def beyond_elements(optimizer: Optimizer, with_closure: bool = False) -> str:
    """Returns the name of the optimizer's class if its updates look beyond an element; empty if they do not. Ours
    compute with full matrices. One that cannot be run by itself looks beyond, except for torch's with other names."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer]
    if any(kind.__module__.startswith("tp_ext.") for kind in kinds):
        return ""
    named = next((kind.__name__ for kind in kinds if _FAMILIES.search(kind.__name__)), "")
    # One that is not torch's may begin to look beyond an element after a warm-up, or where gradients fall
    steps = 3 if type(optimizer).__module__.startswith("torch.") else 20
    elementwise = runs_elementwise(optimizer, steps, with_closure)
    if elementwise and named:  # some look beyond an element in every tenth step alone
        elementwise = runs_elementwise(optimizer, 100, with_closure)
    if elementwise is None:
        inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        if inner and not named:  # a wrapper computes what it wraps
            return next(filter(None, (beyond_elements(wrapped, with_closure) for wrapped in inner)), "")
        # Those of torch that look beyond an element have names that are known
        unknown = not named and not type(optimizer).__module__.startswith("torch.")
        return f"{type(optimizer).__name__}, which cannot be tried on small tensors," if unknown else named
    return "" if elementwise else type(optimizer).__name__


def find_beyond_elements(model: Census, optimizer: Optimizer) -> Iterator[str]:
    """Yields a sentence if such an optimizer holds parameters that are sharded. Communicates nothing."""
    if accepts_shards(optimizer):
        return
    inner = getattr(optimizer, "optim", None)  # of ZeroRedundancyOptimizer
    params = {param for group in optimizer.param_groups for param in group["params"]}
    sharded = _sharded((name, entry.layout) for name, entry in model.parameters.items() if entry.value in params)
    looked_at = inner if isinstance(inner, Optimizer) else optimizer
    if sharded and (hook := _hook_of_user(optimizer)):
        yield _hook_sentence(optimizer, hook, *sharded)
    if sharded and (kind := beyond_elements(looked_at)):
        yield _sentence(kind, *sharded)
    elif found := position_dependent(looked_at, {id(e.value): e.layout for e in model.parameters.values()}):
        yield _bits_sentence(looked_at, *found)


def refuse_on_shards(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises, as a global hook, in the first step of such an optimizer over parameters with the layout of a shard.

    Raises:
        ValueError: on every rank that holds a shard; nothing has been communicated or updated.
    """
    hooks = (Replaced.count, *optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    if _checked.get(optimizer, (-1,)) not in (None, hooks):
        compiled = torch.compiler.is_compiling()
        _look_at(optimizer, len(args) > 1 or kwargs.get("closure") is not None, compiled)


@torch.compiler.disable
def _look_at(optimizer: Optimizer, with_closure: bool, compiled: bool) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    Replaced.refuse(params, "optimizer")
    known = layouts_by_id(params, blocked=True)
    sharded = _sharded((f"a parameter of shape {tuple(p.shape)}", known[id(p)]) for p in params if id(p) in known)
    if sharded is not None:
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing else may run now; its first step outside of a graph is checked
        if hook := _hook_of_user(optimizer):
            raise ValueError(_hook_sentence(optimizer, hook, *sharded))
        inner = getattr(optimizer, "optim", None)  # its own step calls this hook
        if not isinstance(inner, Optimizer) and (kind := beyond_elements(optimizer, with_closure)):
            raise ValueError(_sentence(kind, *sharded))
        if not isinstance(inner, Optimizer) and (found := position_dependent(optimizer, known, with_closure)):
            raise ValueError(_bits_sentence(optimizer, *found))
        if compiled and any(known[id(p)].blocks for p in params if id(p) in known):
            raise NotImplementedError(
                "optimizer: its step must not be compiled for parameters of a model built in tp_invariant: compiled "
                "code rounds otherwise"
            )
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    _checked[optimizer] = (Replaced.count, *hooks)


register_optimizer_step_pre_hook(refuse_on_shards)


def _sharded(table: Iterable[tuple[str, Layout]]) -> tuple[str, int] | None:
    """Returns the first name whose layout has several ranks, or blocks, and the number of ranks."""
    sizes = ((name, math.prod(layout.sizes), layout.blocks) for name, layout in table)
    return next(((name, p) for name, p, blocks in sizes if p > 1 or blocks), None)


def _hook_of_user(optimizer: Optimizer) -> str:
    """Returns the name of a hook of its steps that is not torch's: what it computes of a parameter, or of a gradient,
    is of a shard, and running it on other tensors would have its effects. Empty if there is none."""
    for hook in (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()):
        function = hook.func if isinstance(hook, functools.partial) else hook
        if not f"{getattr(function, '__module__', '')}.".startswith(("torch.", "tp_ext.")):
            return getattr(function, "__qualname__", type(function).__name__)
    return ""


def _hook_sentence(optimizer: Optimizer, hook: str, name: str, p: int) -> str:
    return (
        f"optimizer: {type(optimizer).__name__} must not have the step hook {hook} over {name}, which "
        f"{_is_sharded(p)}: it gets shards as if they were whole; call its function around step(), or "
        "tp_ext.optim.accept(optimizer) if it is right on shards"
    )


def _sentence(kind: str, name: str, p: int) -> str:
    return (
        f"optimizer: {kind} must not update {name}, which {_is_sharded(p)}: it computes with whole tensors, "
        "and would with each shard; take tp_ext.optim.Muon, or an optimizer of single elements, such as "
        "torch.optim.AdamW; tp_ext.optim.accept(optimizer) if it is right on shards"
    )


def _is_sharded(p: int) -> str:
    return f"is sharded over {p} ranks" if p > 1 else "has blocks of tp_invariant, for any number of ranks"


class _NoCollective(TorchDispatchMode):
    """Within it a collective raises: other ranks may not run the optimizer now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "tp_ext"):
            raise RuntimeError(f"{func}: an optimizer that communicates cannot be run on one rank")
        return func(*args, **(kwargs or {}))


_Maker = Callable[[Optimizer, list[dict[str, Any]], list[list[nn.Parameter]]], Optimizer]


def runs_elementwise(optimizer: Optimizer, steps: int, with_closure: bool = False) -> bool | None:
    """Returns whether copies of an optimizer compute the same updates of small tensors and of their halves; None if it
    cannot be copied and run. Changes neither the optimizer nor the state of random generators; communicates nothing.
    What is found is kept by class and options."""
    trial = _Trial(optimizer, with_closure)
    return trial.verdict(f"{steps} steps", functools.partial(_compare, trial, steps))


class _Trial:
    """Runs of copies of an optimizer over small tensors."""

    def __init__(self, optimizer: Optimizer, with_closure: bool) -> None:
        self.optimizer, self._with_closure = optimizer, with_closure
        # Groups with the same options are represented by one
        self.groups = list({repr(options): options for options in map(_options, optimizer.param_groups)}.values())
        param = next((param for group in optimizer.param_groups for param in group["params"]), None)
        self.device = torch.device("cpu") if param is None or param.is_meta else param.device
        self.devices = [self.device.index or 0] if self.device.type == "cuda" else []

    def verdict(self, question: str, compare: Callable[[_Maker], bool]) -> bool | None:
        """Returns what ``compare`` returns of copies; None if there are none that can be run."""
        key = _described(self.optimizer), question, self.device.type, self._with_closure
        if key not in _verdicts:
            # First what the user's optimizer has become; a new one only of those that cannot be copied
            verdicts = (self._run(functools.partial(compare, make)) for make in (_copy, _build))
            _verdicts[key] = next((verdict for verdict in verdicts if verdict is not None), None)
        return _verdicts[key]

    def _run(self, compare: Callable[[], bool]) -> bool | None:
        numbers = random.getstate()
        try:
            with torch.random.fork_rng(self.devices), _NoCollective():
                return compare()
        except Exception:  # an optimizer may need what this run lacks: its own buffers, a closure, other ranks
            return None
        finally:
            random.setstate(numbers)

    def copied(self, make: _Maker, params: list[nn.Parameter]) -> Optimizer:
        """Returns a copy over these parameters, of each group equally many."""
        count = len(params) // len(self.groups)
        return make(self.optimizer, self.groups, [params[i : i + count] for i in range(0, len(params), count)])

    def step(self, copied: Optimizer, params: list[nn.Parameter], grads: list[Tensor]) -> list[Tensor]:
        """Makes a step with these gradients; returns the values before."""
        before = [param.detach().clone() for param in params]
        _step(copied, params, before, [grad.to(self.device) for grad in grads], self._with_closure)
        return before


def _numbers() -> Callable[..., Tensor]:
    """Returns a function that draws from a generator of its own: the process's must not move."""
    generator = torch.Generator().manual_seed(0)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")


def _described(optimizer: Optimizer) -> str:
    """Returns the class and the options of an optimizer and of those that it holds."""
    texts = [f"{type(optimizer)}", *sorted({repr(_options(group)) for group in optimizer.param_groups})]
    for key, value in sorted(vars(optimizer).items()):
        if isinstance(value, int | float | str | None):
            texts.append(f"{key}={value!r}")
        elif isinstance(value, Optimizer):
            texts.append(_described(value))
        elif callable(value) and not hasattr(type(optimizer), key):  # schedulers replace methods
            texts.append(f"{key}: function {next(_functions)}")  # each is another, and may not be kept alive
    return "; ".join(texts)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group, with a learning rate that makes updates visible: a warm-up may have
    0."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    options.pop("initial_lr", None)
    if "differentiable" in options:
        options["differentiable"] = False  # the same update, also of leaves
    if isinstance(lr := options.get("lr"), Tensor):
        options["lr"] = torch.full_like(lr, 0.1)
    elif lr is not None:
        options["lr"] = 0.1
    return options


def _compare(trial: _Trial, steps: int, make: _Maker) -> bool:
    numbers_of = _numbers()
    starts = [numbers_of(shape) for _ in trial.groups for shape in _SHAPES]
    grads = [[numbers_of(start.shape) for start in starts] for _ in range(3)]

    def updates(dim: int = 0, half: int | None = None) -> list[Tensor]:
        """Returns the updates of each tensor, or of one half of each along ``dim``, a step after the other."""

        def cut(whole: Tensor) -> Tensor:
            return whole if half is None else whole.chunk(2, dim)[half].contiguous()

        # Each run begins with the same random state
        torch.default_generator.manual_seed(0)
        for index in trial.devices:
            torch.cuda.default_generators[index].manual_seed(0)
        params = [nn.Parameter(cut(start).to(trial.device, copy=True)) for start in starts]
        copied = trial.copied(make, params)
        seen = []
        for step in range(steps):
            scale = 100.0 ** (step % 3 - 1)  # small and large: what clips only clips the latter
            before = trial.step(copied, params, [scale * cut(grad) for grad in grads[step % 3]])
            seen += [(param.detach() - old).cpu() for param, old in zip(params, before, strict=True)]
        return seen

    whole = updates()
    for dim in (0, 1):  # a rank holds rows or columns, and some optimizers look along one of them alone
        for want, a, b in zip(whole, updates(dim, 0), updates(dim, 1), strict=True):
            if not _close(torch.cat([a, b], dim), want):
                return False
    return True


def _close(got: Tensor, want: Tensor) -> bool:
    """Returns whether updates agree to the rounding of fp32 numbers of about 1, from which they are subtracted."""
    scale = want.abs().max().item()
    return bool(torch.allclose(got, want, rtol=1e-3, atol=1e-3 * scale + 1e-5, equal_nan=True))


def _copy(optimizer: Optimizer, groups: list[dict[str, Any]], params: list[list[nn.Parameter]]) -> Optimizer:
    """Returns an optimizer like the one given, without its state, over other parameters; raises if there is none."""
    kind = type(optimizer)
    param_groups = [{**copy.deepcopy(group), "params": small} for group, small in zip(groups, params, strict=True)]
    memo: dict[int, Any] = {id(optimizer.param_groups): param_groups}  # attributes that are the optimizer's parameters
    for group in optimizer.param_groups:
        small = params[next(i for i, options in enumerate(groups) if repr(options) == repr(_options(group)))]
        memo[id(group["params"])] = small
        memo.update((id(param), small[0]) for param in group["params"])
    # Hooks are the user's, and may communicate. Methods in the instance are those that schedulers have replaced, which
    # would step the original
    own_state = {"state", "param_groups", "grad_scale", "found_inf"}
    kept = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in own_state and "_hooks" not in key and not (callable(value) and hasattr(kind, key))
    }
    # The first step must not take memory for a second optimizer: what would be copied is counted first
    leaves = tree_leaves(kept)
    leaves += [
        leaf for other in leaves if isinstance(other, Optimizer) for leaf in tree_leaves(list(other.state.values()))
    ]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in memo]
    if sum(tensor.numel() for tensor in tensors) > _MAX_COPIED:
        raise ValueError("too much to be copied")
    # Not by its constructor, whose arguments nothing has kept; __setstate__ adds what classes expect of a loaded one
    clone: Optimizer = kind.__new__(kind)
    clone.__setstate__({**copy.deepcopy(kept, memo), "state": defaultdict(dict), "param_groups": param_groups})
    return clone


def _build(optimizer: Optimizer, groups: list[dict[str, Any]], params: list[list[nn.Parameter]]) -> Optimizer:
    """Returns a new optimizer of the class, for those that make their state when they are made, as Adagrad does."""
    kind = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    param_groups = [{**copy.deepcopy(group), "params": small} for group, small in zip(groups, params, strict=True)]
    new: Optimizer = kind(param_groups, **{key: value for key, value in groups[0].items() if key in known})
    return new


def _step(
    optimizer: Optimizer, params: list[nn.Parameter], before: list[Tensor], grads: list[Tensor], with_closure: bool
) -> None:
    """Makes a step from the values ``before`` with these gradients, without hooks; also with a closure where the
    optimizer asks for one."""
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]

    def closure() -> Any:
        """Sets gradients that depend on the parameters: an optimizer such as SAM moves them within its step, by a norm
        that only other gradients there reveal."""
        for param, grad, start in zip(params, grads, before, strict=True):
            param.grad = grad * (1 + 30 * (param.detach() - start))
        return grads[0].new_ones(())

    closure()
    asks = next((p for p in inspect.signature(step).parameters.values() if p.name == "closure"), None)
    if with_closure or (asks is not None and asks.default is inspect.Parameter.empty):
        step(optimizer, closure)
    else:
        step(optimizer)


def position_dependent(
    optimizer: Optimizer, layouts: Mapping[int, Layout], with_closure: bool = False
) -> tuple[torch.dtype, bool] | None:
    """Returns the dtype of parameters with blocks in which bits of the optimizer depend on where a shard ends, and
    whether that was measured: not of an optimizer that cannot be run by itself. None if there is none."""
    if any(kind.__module__.startswith("tp_ext.") for kind in type(optimizer).__mro__):
        return None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    blocked = [param for param in params if id(param) in layouts and layouts[id(param)].blocks]
    verdicts = ((dtype, has_same_bits(optimizer, dtype, with_closure)) for dtype in {param.dtype for param in blocked})
    return next(((dtype, same is not None) for dtype, same in verdicts if not same), None)


def _bits_sentence(optimizer: Optimizer, dtype: torch.dtype, measured: bool) -> str:
    name = f"{type(optimizer).__name__}({_switches(optimizer)})"
    why = "its last bits depend on where a shard ends" if measured else "it cannot be run by itself to see its bits"
    return (
        f"optimizer: {name} must not update {dtype} parameters of a model built in tp_invariant: {why}; take "
        "torch.optim.AdamW (fused=False), or parameters in torch.float32; tp_ext.optim.accept(optimizer) if its bits "
        "do not"
    )


def _switches(optimizer: Optimizer) -> str:
    """Returns the options that an optimizer computes otherwise by: those that are set, without rates."""
    options = optimizer.param_groups[0] if optimizer.param_groups else {}
    return ", ".join(f"{key}={value}" for key, value in options.items() if key != "params" and value is True)


def has_same_bits(optimizer: Optimizer, dtype: torch.dtype, with_closure: bool = False) -> bool | None:
    """Returns whether copies of an optimizer compute the same bits of tensors, and of their states, as of odd slices;
    None if it cannot be copied and run. Changes and communicates nothing; what is found is kept, as of
    :func:`runs_elementwise`."""
    trial = _Trial(optimizer, with_closure)
    if any(options.get("fused") for options in trial.groups):
        return False  # with fused multiplications and additions in part: some differ so rarely that no trial sees it
    return trial.verdict(f"bits of {dtype}", functools.partial(_compare_bits, trial, dtype))


def _compare_bits(trial: _Trial, dtype: torch.dtype, make: _Maker) -> bool:
    draw = _numbers()

    def numbers(_: int) -> list[Tensor]:
        # Of all magnitudes, since rounding shows where an update is about as large as what it is added to
        sizes = ((draw(_BIT_SHAPE), draw(_BIT_SHAPE)) for _ in trial.groups)
        return [(number * 10.0 ** (2 * size - 2)).clamp(-100, 100).to(dtype) for number, size in sizes]

    starts, *grads = map(numbers, range(1 + _BIT_STEPS))

    def trained(dim: int, start: int, stop: int) -> list[Tensor]:
        def cut(whole: Tensor) -> Tensor:
            return whole[(slice(None),) * dim + (slice(start, stop),)].contiguous().to(trial.device, copy=True)

        params = [nn.Parameter(cut(start)) for start in starts]
        copied = trial.copied(make, params)
        for of_step in grads:
            trial.step(copied, params, list(map(cut, of_step)))
        states = (state for p in params for state in copied.state[p].values() if isinstance(state, Tensor))
        return [*(param.detach() for param in params), *(state for state in states if state.shape == params[0].shape)]

    whole = trained(0, 0, _BIT_SHAPE[0])
    for dim, cuts in enumerate(_BIT_CUTS):
        parts = [trained(dim, *ends) for ends in itertools.pairwise(cuts)]
        if not all(_equal_bits(torch.cat(shards, dim), want) for *shards, want in zip(*parts, whole, strict=True)):
            return False
    return True


def _equal_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
