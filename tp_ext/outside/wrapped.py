"""The functions of torch that are wrapped, once, at the import of tp_ext: :data:`WRAPPED` is the only list of them.

Each wrapper passes everything through to torch until this process has made a shard, and afterwards what is no shard.
With ``TP_EXT_WRAP_TORCH=0`` in the environment nothing is wrapped; then the first shard warns, once.
"""

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import safetensors.torch
import torch.distributed._state_dict_utils as copies
import torch.distributed.checkpoint.default_planner as planner
import torch.distributed.checkpoint.state_dict as states
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import init
from torch.nn.utils import clip_grad
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from tp_ext.model.layouts import Carriers
from tp_ext.outside import (
    clipping,
    distributed_checkpoint,
    exports,
    initialisers,
    parametrizations,
    scaling,
    state_dicts,
)
from tp_ext.outside.trainers import TRAINERS

SWITCH = "TP_EXT_WRAP_TORCH"


class Wrapped(NamedTuple):
    """A function of torch and what is called in its place.

    Attributes:
        holder: the class or module where torch looks it up.
        name: there.
        parameters: its parameters, the same in each supported version; ``name=default``.
        ours: takes torch's function, then its arguments.
        instead: the call to use where it is not wrapped.
        always: whether ours is called in a process that has made no shard, too: a state may come from another process.
    """

    holder: Any
    name: str
    parameters: str
    ours: Callable[..., Any]
    instead: str
    always: bool = False

    @property
    def title(self) -> str:
        """The name under which users know it."""
        return f"{self.holder.__name__}.{self.name}"


_CHECKPOINT = "tp_ext.save_checkpoint, tp_ext.load_checkpoint, tp_ext.full_state_dict"
_NORM = "norm_type=2.0, error_if_nonfinite=False, foreach=None"

# [Note: functions of torch without a hook are wrapped, in one list]
WRAPPED = [
    Wrapped(
        clip_grad,
        "clip_grad_norm_",
        f"parameters, max_norm, {_NORM}",
        clipping.clip_grad_norm_,
        "tp_ext.clip_grad_norm_(model, max_norm)",
    ),
    # get_total_norm is a second name of this one
    Wrapped(clip_grad, "_get_total_norm", f"tensors, {_NORM}", clipping.get_total_norm, "tp_ext.grad_norm(model)"),
    Wrapped(
        GradScaler,
        "_unscale_grads_",
        "self, optimizer, inv_scale, found_inf, allow_fp16",
        scaling.unscale_grads_,
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(device, process_group=group)",
    ),
    Wrapped(
        ParametrizationList,
        "__init__",
        "self, modules, original, unsafe=False",
        parametrizations.make_parametrization_list,
        "tp_ext.shardings(model), which refuses some of those that are not elementwise",
    ),
    Wrapped(ParametrizationList, "append", "self, module", parametrizations.append_parametrization, "the same"),
    Wrapped(
        BasePruningMethod,
        "apply",
        "cls, module, name, *args, importance_scores=None, **kwargs",
        parametrizations.apply_pruning,
        "torch.nn.utils.prune.custom_from_mask",
    ),
    *(
        Wrapped(holder, "apply", parameters, parametrizations.apply_old_norm, "torch.nn.utils.parametrizations")
        for holder, parameters in (
            (WeightNorm, "module, name, dim"),
            (SpectralNorm, "module, name, n_power_iterations, dim, eps"),
        )
    ),
    *(
        Wrapped(init, name, parameters, initialisers.initialise, "init= of the layer")
        for name, parameters in {
            "uniform_": "tensor, a=0.0, b=1.0, generator=None",
            "normal_": "tensor, mean=0.0, std=1.0, generator=None",
            "trunc_normal_": "tensor, mean=0.0, std=1.0, a=-2.0, b=2.0, generator=None",
            "eye_": "tensor",
            "dirac_": "tensor, groups=1",
            "xavier_uniform_": "tensor, gain=1.0, generator=None",
            "xavier_normal_": "tensor, gain=1.0, generator=None",
            "kaiming_uniform_": "tensor, a=0, mode='fan_in', nonlinearity='leaky_relu', generator=None",
            "kaiming_normal_": "tensor, a=0, mode='fan_in', nonlinearity='leaky_relu', generator=None",
            "orthogonal_": "tensor, gain=1, generator=None",
            "sparse_": "tensor, sparsity, std=0.01, generator=None",
        }.items()
    ),
    *(
        Wrapped(safetensors.torch, name, parameters, exports.flatten, "tp_ext.save_safetensors")
        for name, parameters in {"_flatten": "tensors", "_flatten_as_ptr": "tensors, keep_alive_buffer"}.items()
        if hasattr(safetensors.torch, name)  # versions have one of them or both
    ),
    Wrapped(init, "_calculate_fan_in_and_fan_out", "tensor", initialisers.fans, "init= of the layer"),
    Wrapped(
        nn.Module,
        "state_dict",
        "self, *args, destination=None, prefix='', keep_vars=False",
        state_dicts.module_state_dict,
        _CHECKPOINT,
        always=True,
    ),
    Wrapped(
        nn.Module,
        "load_state_dict",
        "self, state_dict, strict=True, assign=False",
        state_dicts.module_load_state_dict,
        _CHECKPOINT,
        always=True,
    ),
    Wrapped(Optimizer, "state_dict", "self", state_dicts.optimizer_state_dict, _CHECKPOINT, True),
    Wrapped(Optimizer, "load_state_dict", "self, state_dict", state_dicts.optimizer_load_state_dict, _CHECKPOINT, True),
    Wrapped(
        copies,
        "_iterate_state_dict",
        "iter_object, sharded_tensor_func, dtensor_func, tensor_func, *, pg=None, device=None, cpu_offload=False, "
        "companion_obj=None, ranks_only=(), type_check=True, non_blocking=True",
        distributed_checkpoint.copied,
        _CHECKPOINT,
        always=True,
    ),
    *(
        Wrapped(states, name, parameters, ours, _CHECKPOINT, always=True)
        for name, parameters, ours in (
            ("_get_model_state_dict", "model, info", distributed_checkpoint.get_model),
            ("_load_model_state_dict", "model, state_dict, info", distributed_checkpoint.load_model),
            ("_get_optim_state_dict", "model, optimizers, info", distributed_checkpoint.get_optimizers),
            ("_load_optim_state_dict", "model, optimizers, state_dict, info", distributed_checkpoint.load_optimizers),
        )
    ),
    *(
        Wrapped(planner, f"create_default_local_{name}_plan", parameters, ours, _CHECKPOINT, always=True)
        for name, parameters, ours in (
            ("save", "state_dict, is_coordinator", distributed_checkpoint.save_plan),
            ("load", "state_dict, metadata, strict=True", distributed_checkpoint.load_plan),
        )
    ),
]


_wrapped_trainers: set[type] = set()


def parameters_of(function: Callable[..., Any]) -> str:
    """Returns the parameters of a function as in :attr:`Wrapped.parameters`."""
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(plain))[1:-1]


def install() -> None:
    """Wraps all of :data:`WRAPPED`, or none if the environment says so."""
    if os.environ.get(SWITCH, "1") == "0":
        Carriers.at_each = _warn
        return
    for one in WRAPPED:
        _wrap(one)
    Carriers.at_each = _wrap_trainers


def imported_trainers() -> Iterator[Wrapped]:
    """Yields those of :data:`TRAINERS` that this process has imported."""
    for module, holder, name, parameters, ours in TRAINERS:
        found = getattr(sys.modules.get(module), holder, None)
        if found is not None:
            yield Wrapped(
                found, name, parameters, ours, "tp_ext.lightning.TensorParallelStrategy, tp_ext.huggingface.prepare"
            )


def _wrap_trainers() -> None:
    for one in imported_trainers():
        if one.holder not in _wrapped_trainers:
            _wrapped_trainers.add(one.holder)
            _wrap(one)


def _wrap(one: Wrapped) -> None:
    found = inspect.getattr_static(one.holder, one.name)
    kind = type(found) if isinstance(found, staticmethod | classmethod) else None
    torchs = found.__func__ if kind else found
    inner: Callable[..., Any] = getattr(torchs, "__wrapped__", torchs)
    cells = [cell for cell in torchs.__closure__ or () if cell.cell_contents is inner]
    if cells:
        # Behind torch's own decorator: code that imported the function before tp_ext, or under another name, calls
        # the decorated one, which calls what is in this cell
        cells[0].cell_contents = _passing(one, inner)
    else:
        replaced = _passing(one, torchs)
        setattr(one.holder, one.name, kind(replaced) if kind else replaced)


def _passing(one: Wrapped, torchs: Callable[..., Any]) -> Callable[..., Any]:
    ours = one.ours

    @functools.wraps(torchs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (one.always or Carriers.exist):
            return torchs(*args, **kwargs)
        return ours(torchs, *args, **kwargs)

    return call


def _warn() -> None:
    Carriers.at_each = None
    calls = "; ".join(f"{one.title}: {one.instead}" for one in WRAPPED)
    warnings.warn(
        f"{SWITCH}=0: these functions of torch take this rank's shard for the whole; call instead: {calls}",
        stacklevel=2,
    )
