"""Strategies of Lightning and loaders of accelerate around sharded layers: right, or refused with what to take instead.

Nothing here imports them: their methods are wrapped when a process has imported them.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_ext._checksum import bits_of, checksum
from tp_ext._object_collectives import all_gather_objects
from tp_ext.group import global_ranks
from tp_ext.model.carriers import Carriers
from tp_ext.model.census import census
from tp_ext.outside.live_shards import layouts_by_id
from tp_ext.outside.places import local_of
from tp_ext.parallel.grad_norm import gradient_terms, norm_of_rows
from tp_ext.parallel.replicas import check_layers
from tp_ext.sharding import Layout

_INSTEAD = "take tp_ext.lightning.TensorParallelStrategy"


def set_up_replicas(theirs: Callable[..., Any], strategy: Any, trainer: Any) -> Any:
    """Sets up a strategy that takes each process for a data-parallel rank, as Lightning does.

    Raises:
        ValueError: a layer is sharded over several of them.
    """
    for ranks, name in census(strategy.model).sharded_over.items():
        raise ValueError(
            f"strategy: {type(strategy).__name__} takes each process for a data-parallel rank, and {name!r} is sharded "
            f"over ranks {list(ranks)}: {_INSTEAD}"
        )
    return theirs(strategy, trainer)


def set_up_mesh(theirs: Callable[..., Any], strategy: Any, trainer: Any) -> Any:
    """Sets up Lightning's ``ModelParallelStrategy``. It averages no gradients and draws no weights: FSDP2 and
    equal seeds must do so.

    Communicates, if a layer is sharded: 8 bytes and the name of each replicated parameter over the tensor-parallel
    ranks.

    Raises:
        ValueError: layers are sharded over other ranks than those of its mesh; gradients would differ along the data
            axis, or weights differ on the tensor-parallel ranks.
    """
    model: nn.Module = strategy.model
    known = census(model)
    if getattr(strategy, "averages_gradients", False) or not known.sharded_over:  # the former: ours
        return theirs(strategy, trainer)
    mesh: DeviceMesh = strategy.device_mesh
    check_layers(known, mesh["tensor_parallel"], mesh["data_parallel"])
    _check_averaged(model, mesh, strategy, f"{_INSTEAD}, or fully_shard(.., mesh=device_mesh['data_parallel'])")
    data_mesh = theirs(strategy, trainer)
    advice = f"call lightning.seed_everything before the model is made, or {_INSTEAD}"
    check_replicated(strategy.model, mesh["tensor_parallel"], advice)
    return data_mesh


def set_up_module(theirs: Callable[..., nn.Module], strategy: Any, module: nn.Module) -> nn.Module:
    """The same of Lightning Fabric, for one module."""
    model = theirs(strategy, module)
    if census(model).sharded_over:
        _check_averaged(
            model, strategy.device_mesh, strategy, "call fully_shard(.., mesh=mesh['data_parallel']) in parallelize_fn"
        )
    return model


def _check_averaged(model: nn.Module, mesh: DeviceMesh, strategy: Any, instead: str) -> None:
    data = mesh["data_parallel"]
    for name, param in model.named_parameters() if data.size() > 1 else ():
        if param.requires_grad and not isinstance(param, DTensor):
            raise ValueError(
                f"strategy: {type(strategy).__name__} averages no gradients over data_parallel_size = {data.size()}, "
                f"and {name!r} is not under fully_shard: {instead}"
            )


def check_replicated(model: nn.Module, axis: DeviceMesh, advice: str) -> None:
    """Raises the same ValueError on all ranks of an axis that share a model unless they hold the same replicated
    parameters.

    Communicates: 8 bytes and the name of each over the axis.
    """
    ranks = global_ranks(axis)
    tensors = {
        name: entry.value
        for name, entry in census(model).parameters.items()
        if all(group.ranks != ranks for _, group in entry.layout)
    }
    mine = {n: checksum(bits_of(local_of(t)))[0].item() for n, t in tensors.items() if not t.is_meta and t.numel()}
    reports = all_gather_objects(mine, axis.get_group())
    for name in mine:
        differing = [rank for rank, report in zip(ranks, reports, strict=True) if report.get(name) != reports[0][name]]
        if differing:
            raise ValueError(
                f"model: {name!r} must be the same on the tensor-parallel ranks {ranks}, and differs: ranks whose "
                f"weights differ from rank {ranks[0]}'s are {differing}: {advice}"
            )


def gradient_norms(
    theirs: Callable[..., dict[str, Any]], module: nn.Module, norm_type: Any, group_separator: str = "/"
) -> dict[str, Any]:
    """Returns the norm of each gradient, and of all, as Lightning's ``grad_norm``, of the unsharded model.

    Communicates, if a parameter is a shard: as :func:`tp_ext.grad_norm`, for each parameter.
    """
    params = {name: param for name, param in module.named_parameters() if param.grad is not None}
    known = layouts_by_id(params.values())
    if known.keys().isdisjoint(map(id, params.values())):
        return theirs(module, norm_type, group_separator)
    order = float(norm_type)
    title = f"grad_{order}_norm"
    rows = {name: (param, known.get(id(param), Layout()), gradient_terms(param)) for name, param in params.items()}
    norms: dict[str, Any] = {
        f"{title}{group_separator}{name}": norm_of_rows([row], order) for name, row in rows.items()
    }
    return norms | {f"{title}_total": norm_of_rows([*rows.values()], order)}


def prepare_data_loader(
    theirs: Callable[..., Any],
    accelerator: Any,
    data_loader: Any,
    device_placement: Any = None,
    slice_fn_for_dispatch: Any = None,
) -> Any:
    """Prepares a loader as ``Accelerator.prepare_data_loader``, and warns if ranks that share a layer would get other
    batches. Not an error: the loader may be for another model, which nothing shows, and an old model, which keeps its
    layers alive until it is collected, is not there on all ranks alike."""
    prepared = getattr(data_loader, "_is_accelerate_prepared", False)
    if not prepared and accelerator.num_processes > 1 and getattr(accelerator.parallelism_config, "tp_size", 1) == 1:
        for module in list(Carriers.modules)[:1]:
            warnings.warn(
                f"accelerate gives each of the {accelerator.num_processes} processes other batches of this loader, and "
                f"{type(module).__name__} is sharded over several of them, which must have the same: prepare model and "
                "loader together, by tp_ext.huggingface.prepare",
                stacklevel=3,
            )
    return theirs(accelerator, data_loader, device_placement, slice_fn_for_dispatch)


def make_accelerator(theirs: Callable[..., None], trainer: Any) -> None:
    """Makes the accelerator of a trainer of transformers.

    Raises:
        ValueError: the model is sharded, and the trainer takes each process for a data-parallel rank.
    """
    model, kind = trainer.model, type(trainer).__name__
    # An unsharded model, or one of transformers' own shards, has no layers of ours
    if isinstance(model, nn.Module) and not getattr(trainer, "shares_model", False):
        for ranks, name in census(model).sharded_over.items():
            raise ValueError(
                f"model: {name!r} is sharded over ranks {list(ranks)}, and {kind} takes each process for a "
                f"data-parallel rank: use tp_ext.huggingface.trainer_for({kind})"
            )
    theirs(trainer)
