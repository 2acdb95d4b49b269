"""The functions of torch that are wrapped, once, at the import of tp_ext: :data:`WRAPPED` is the only list of them.

Each wrapper passes everything through to torch until this process has made a shard, and afterwards what is no shard.
Modules of torch that are not imported yet are wrapped after their import, and what the wrappers call is imported with
the first shard, so that importing tp_ext is cheap.
With ``TP_EXT_WRAP_TORCH=0`` in the environment nothing is wrapped; then the first shard warns, once.
"""

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from tp_ext._imports import after_import, import_now
from tp_ext.model.carriers import Carriers

SWITCH = "TP_EXT_WRAP_TORCH"


class Wrapped(NamedTuple):
    """A function of torch and what is called in its place.

    Attributes:
        module: where torch looks it up; it is wrapped when that module has been imported.
        kind: the class there; empty for a function of the module.
        name: there.
        parameters: its parameters, the same in each supported version; ``name=default``.
        ours: a function of this folder, ``file.name``, which takes torch's function, then its arguments.
        instead: the call to use where it is not wrapped.
        always: whether ours is called in a process that has made no shard, too: a state may come from another process.
    """

    module: str
    kind: str
    name: str
    parameters: str
    ours: str
    instead: str
    always: bool = False

    @property
    def title(self) -> str:
        """The name under which users know it."""
        return f"{self.kind or self.module}.{self.name}"

    @property
    def holder(self) -> Any:
        """The class or the module."""
        module = sys.modules[self.module]
        return getattr(module, self.kind) if self.kind else module


_CHECKPOINT = "tp_ext.save_checkpoint, tp_ext.load_checkpoint, tp_ext.full_state_dict"
_STRATEGY = "tp_ext.lightning.TensorParallelStrategy"
_NORM = "norm_type=2.0, error_if_nonfinite=False, foreach=None"

# [Note: functions of torch without a hook are wrapped, in one list]
WRAPPED = [
    Wrapped(
        "torch.nn.utils.clip_grad",
        "",
        "clip_grad_norm_",
        f"parameters, max_norm, {_NORM}",
        "clipping.clip_grad_norm_",
        "tp_ext.clip_grad_norm_(model, max_norm)",
    ),
    # get_total_norm is a second name of this one
    Wrapped(
        "torch.nn.utils.clip_grad",
        "",
        "_get_total_norm",
        f"tensors, {_NORM}",
        "clipping.get_total_norm",
        "tp_ext.grad_norm(model)",
    ),
    Wrapped(
        "torch.amp.grad_scaler",
        "GradScaler",
        "_unscale_grads_",
        "self, optimizer, inv_scale, found_inf, allow_fp16",
        "scaling.unscale_grads_",
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(device, process_group=group)",
    ),
    Wrapped(
        "torch.nn.utils.parametrize",
        "ParametrizationList",
        "__init__",
        "self, modules, original, unsafe=False",
        "parametrizations.make_parametrization_list",
        "tp_ext.shardings(model), which refuses some of those that are not elementwise",
    ),
    Wrapped(
        "torch.nn.utils.parametrize",
        "ParametrizationList",
        "append",
        "self, module",
        "parametrizations.append_parametrization",
        "the same",
    ),
    Wrapped(
        "torch.nn.utils.prune",
        "BasePruningMethod",
        "apply",
        "cls, module, name, *args, importance_scores=None, **kwargs",
        "parametrizations.apply_pruning",
        "torch.nn.utils.prune.custom_from_mask",
    ),
    *(
        Wrapped(
            f"torch.nn.utils.{module}",
            kind,
            "apply",
            parameters,
            "parametrizations.apply_old_norm",
            "torch.nn.utils.parametrizations",
        )
        for module, kind, parameters in (
            ("weight_norm", "WeightNorm", "module, name, dim"),
            ("spectral_norm", "SpectralNorm", "module, name, n_power_iterations, dim, eps"),
        )
    ),
    *(
        Wrapped("torch.nn.init", "", name, parameters, "initialisers.initialise", "init= of the layer")
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
        Wrapped("safetensors.torch", "", name, parameters, "exports.flatten", "tp_ext.save_safetensors")
        for name, parameters in {"_flatten": "tensors", "_flatten_as_ptr": "tensors, keep_alive_buffer"}.items()
    ),
    Wrapped("torch.nn.init", "", "_calculate_fan_in_and_fan_out", "tensor", "initialisers.fans", "init= of the layer"),
    *(
        Wrapped(module, kind, name, parameters, f"state_dicts.{kind.lower()}_{name}", _CHECKPOINT, always=True)
        for module, kind, name, parameters in (
            ("torch.nn", "Module", "state_dict", "self, *args, destination=None, prefix='', keep_vars=False"),
            ("torch.nn", "Module", "load_state_dict", "self, state_dict, strict=True, assign=False"),
            ("torch.optim", "Optimizer", "state_dict", "self"),
            ("torch.optim", "Optimizer", "load_state_dict", "self, state_dict"),
        )
    ),
    Wrapped(
        "torch.distributed._state_dict_utils",
        "",
        "_iterate_state_dict",
        "iter_object, sharded_tensor_func, dtensor_func, tensor_func, *, pg=None, device=None, cpu_offload=False, "
        "companion_obj=None, ranks_only=(), type_check=True, non_blocking=True",
        "distributed_checkpoint.copied",
        _CHECKPOINT,
        always=True,
    ),
    *(
        Wrapped("torch.distributed.checkpoint.state_dict", "", name, parameters, ours, _CHECKPOINT, always=True)
        for name, parameters, ours in (
            ("_get_model_state_dict", "model, info", "distributed_checkpoint.get_model"),
            ("_load_model_state_dict", "model, state_dict, info", "distributed_checkpoint.load_model"),
            ("_get_optim_state_dict", "model, optimizers, info", "distributed_checkpoint.get_optimizers"),
            ("_load_optim_state_dict", "model, optimizers, state_dict, info", "distributed_checkpoint.load_optimizers"),
        )
    ),
    *(
        Wrapped(
            "torch.distributed.checkpoint.default_planner",
            "",
            f"create_default_local_{name}_plan",
            parameters,
            ours,
            _CHECKPOINT,
            always=True,
        )
        for name, parameters, ours in (
            ("save", "state_dict, is_coordinator", "distributed_checkpoint.save_plan"),
            ("load", "state_dict, metadata, strict=True", "distributed_checkpoint.load_plan"),
        )
    ),
    Wrapped(
        "torch.distributed.checkpoint.hf_storage",
        "HuggingFaceStorageWriter",
        "prepare_global_plan",
        "self, plans",
        "distributed_checkpoint.plan_of_safetensors",
        "tp_ext.save_safetensors",
        always=True,
    ),
]


# Methods of trainers. `import tp_ext` imports none of them
TRAINERS = [
    *(
        Wrapped(f"{root}.strategies.{module}", f"{kind}Strategy", "setup", "self, trainer", ours, _STRATEGY)
        for root in ("lightning.pytorch", "pytorch_lightning")
        for module, kind, ours in (
            ("model_parallel", "ModelParallel", "trainers.set_up_mesh"),
            ("ddp", "DDP", "trainers.set_up_replicas"),
            ("fsdp", "FSDP", "trainers.set_up_replicas"),
            ("deepspeed", "DeepSpeed", "trainers.set_up_replicas"),
        )
    ),
    *(
        Wrapped(
            f"{root}.strategies.model_parallel",
            "ModelParallelStrategy",
            "setup_module",
            "self, module",
            "trainers.set_up_module",
            _STRATEGY,
        )
        for root in ("lightning.fabric", "lightning_fabric")
    ),
    *(
        Wrapped(
            f"{root}.{module}",
            "",
            "grad_norm",
            "module, norm_type, group_separator='/'",
            "trainers.gradient_norms",
            "tp_ext.grad_norm(model)",
        )
        for root in ("lightning.pytorch", "pytorch_lightning")
        for module in ("utilities.grads", "utilities")
    ),
    Wrapped(
        "accelerate.accelerator",
        "Accelerator",
        "prepare_data_loader",
        "self, data_loader, device_placement=None, slice_fn_for_dispatch=None",
        "trainers.prepare_data_loader",
        "tp_ext.huggingface.prepare",
    ),
    Wrapped(
        "transformers.trainer",
        "Trainer",
        "create_accelerator_and_postprocess",
        "self",
        "trainers.make_accelerator",
        "tp_ext.huggingface.trainer_for(cls)",
    ),
]

_ours: dict[str, Callable[..., Any]] = {}  # by Wrapped.ours, filled by _load


def install() -> None:
    """Wraps all of :data:`WRAPPED` and :data:`TRAINERS`, or none if the environment says so."""
    if os.environ.get(SWITCH, "1") == "0":
        Carriers.at_each = _warn
        return
    for wrapped in (*WRAPPED, *TRAINERS):
        after_import(wrapped.module, functools.partial(_wrap, wrapped))
    Carriers.at_each = _load


def _load() -> None:
    """Imports what wrappers call, and what registers hooks of torch. Only a process with shards pays for that, or one
    that makes or loads a state dict."""
    Carriers.at_each = None
    for name in ("tp_ext.outside.optimizers", "tp_ext.parallel.ddp_guard"):
        import_now(name)
    for wrapped in (*WRAPPED, *TRAINERS):
        file, function = wrapped.ours.split(".")
        _ours[wrapped.ours] = getattr(import_now(f"tp_ext.outside.{file}"), function)


def _wrap(wrapped: Wrapped) -> None:
    if wrapped.module == "safetensors.torch" and not hasattr(wrapped.holder, wrapped.name):
        return  # versions have one of them or both
    # As it is stored: a class or static method is put back as one
    stored = inspect.getattr_static(wrapped.holder, wrapped.name)
    kind = type(stored) if isinstance(stored, staticmethod | classmethod) else None
    torchs = stored.__func__ if kind else stored
    inner: Callable[..., Any] = getattr(torchs, "__wrapped__", torchs)
    cells = [cell for cell in torchs.__closure__ or () if cell.cell_contents is inner]
    if cells:
        # Behind torch's own decorator: code that imported the function before tp_ext, or under another name, calls
        # the decorated one, which calls what is in this cell
        cells[0].cell_contents = _passing(wrapped, inner)
    else:
        replaced = _passing(wrapped, torchs)
        setattr(wrapped.holder, wrapped.name, kind(replaced) if kind else replaced)


def _passing(wrapped: Wrapped, torchs: Callable[..., Any]) -> Callable[..., Any]:
    always, ours = wrapped.always, wrapped.ours

    @functools.wraps(torchs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (always or Carriers.exist):
            return torchs(*args, **kwargs)
        if ours not in _ours:
            _load()
        return _ours[ours](torchs, *args, **kwargs)

    return call


def _warn() -> None:
    _load()
    calls = "; ".join(f"{wrapped.title}: {wrapped.instead}" for wrapped in WRAPPED)
    warnings.warn(
        f"{SWITCH}=0: these functions of torch take this rank's shard for the whole; call instead: {calls}",
        stacklevel=2,
    )
