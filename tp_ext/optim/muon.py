"""Muon for sharded parameters: momentum orthogonalized by Newton-Schulz, of the full matrices.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is scalable for LLM
training" (arXiv:2502.16982), whose learning rate is ``adjust_lr_fn="match_rms_adamw"``.

Letters of shapes: a weight W, its gradient G, its momentum B and the update U are [m, n], or [E, m, n], of which
each of the E matrices is orthogonalized by itself.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from tp_ext._checks import check_bool, check_choice, check_number
from tp_ext._object_collectives import all_gather_along, all_gather_objects, differs_between_ranks, raise_first
from tp_ext.group import NOT_GIVEN, Group, process_group
from tp_ext.invariance import one_thread
from tp_ext.mesh import DataAxes
from tp_ext.model.census import warn_unneeded_group
from tp_ext.model.stages import Stages
from tp_ext.optim.matrices import ShardOf, local_tensor, shard_of
from tp_ext.optim.parameters import Placed
from tp_ext.optim.work import MatrixBucket, MuonOptions, buckets, find_matrices

_RATES = (None, "original", "match_rms_adamw", "spectral_unclamped")
_FORMS = ("auto", "gather", "gram")


class Muon(Optimizer):
    """Muon for matrices, AdamW for other parameters, of a model sharded in any way: over the groups of its layouts, by
    FSDP2 over data axes, in stages of a pipeline.

    ``B <- momentum B + (1 - momentum) G``; ``U = momentum B + (1 - momentum) G`` (Nesterov; else B);
    ``W <- (1 - lr weight_decay) W - lr' NS(U)``, with ``lr' = lr max(1, rows / columns)^0.5`` or as ``adjust_lr_fn``
    says. ``NS`` and ``lr'`` are those of a whole matrix of the unsharded model, on any number of ranks. A matrix is a
    part of the parameter's :class:`Sharding` (q, k and v, gate and up each on its own), of a 3-D parameter one of each
    index of its first dim. A matrix is orthogonalized by one rank; the ranks share the matrices, those of replicas too.

    ``state`` has tensors of the shapes of the local parameters, so checkpoints and full states hold it as that of other
    optimizers. Of a parameter with one part, one process computes the bits of ``torch.optim.Muon``; ``form="gather"``
    computes the bits of one process from equal gradients, on any number of ranks.

    Args:
        params: the matrices, 2-D or 3-D, in a form that ``torch.optim`` takes (:func:`split_parameters` finds them).
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as ``torch.optim.Muon``.
        adamw_params: the parameters for AdamW, in the same forms; groups may have an ``lr`` and ``weight_decay`` of
            their own, and ``betas`` and ``adamw_eps``.
        betas, adamw_eps: as ``betas`` and ``eps`` of ``torch.optim.AdamW``.
        ns_dtype: dtype of the orthogonalization, in which matrices are sent.
        form: what ranks send to the one that orthogonalizes: "gather" the matrix; "gram" its Gram matrix (X X^T), at
            least in fp32, where every rank holds the whole short side; "auto" what is fewer bytes. Of a model built in
            :func:`tp_ext.tp_invariant` it is always the matrix, which one thread orthogonalizes.
        bucket_cap_mb: MiB of matrices in ``ns_dtype`` that are exchanged at a time.
        model: the model, or the stages that this rank holds, whose layouts are used, and over whose replicas (DDP) the
            matrices are shared. Without it the layouts are those that parameters carry. Needed under FSDP2.
        group: deprecated: the group of parameters that carry ``tp_sharding`` alone; with ``model`` as for
            :func:`full_state_dict`.
        mesh: with ``model``, in place of ``group``: a mesh with axes as of :func:`tp_ext.init_mesh`, over
            whose replicas, too, the matrices are shared.

    Communicates: in the first step, and when other parameters have gradients than before, one exchange of shapes over
    each axis. In each step one all-reduce of 16 bytes over each axis, for which the host waits, and for each bucket two
    all-to-alls over each axis over which the matrices are sharded or replicated (docs/guide/optimizers.md).

    Raises:
        ValueError: an argument out of its range; a parameter of one dim; a DTensor without ``model``; in a
            step, ranks with different parameters, or with gradients of different ones. TypeError: a dtype that is not a
            floating one; an option of another type.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_params: Any = (),
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        ns_dtype: torch.dtype = torch.bfloat16,
        form: str = "auto",
        bucket_cap_mb: float = 256,
        model: Stages | None = None,
        group: Group = NOT_GIVEN,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not isinstance(ns_dtype, torch.dtype) or not ns_dtype.is_floating_point:
            raise TypeError(f"ns_dtype: {ns_dtype!r} must be a floating dtype")
        check_choice(_FORMS, form=form)
        check_bool(nesterov=nesterov)
        check_number(bucket_cap_mb=bucket_cap_mb)
        check_number(above=0, bucket_cap_mb=bucket_cap_mb)
        if mesh is not None and model is None:
            raise ValueError("mesh: must be given together with model")
        self._in_blocks = False
        self._ns_dtype, self._form, self._bucket_bytes = ns_dtype, form, int(bucket_cap_mb * 2**20)
        self._placed = Placed(model, group, mesh)
        self._key: tuple[int, ...] | None = None
        self._axes: tuple[int, DataAxes, torch.device] | None = None
        self._buckets: list[MatrixBucket] = []
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        # In the groups, not in two optimizers: checkpoints and schedulers know one
        matrices = [{**options, "use_muon": True} for options in _groups(params)]
        others = [{**options, "use_muon": False} for options in _groups(adamw_params)]
        # Matrices first: the number of a parameter, which ranks compare, is its place in this order
        super().__init__([*matrices, *others], defaults)
        carried = [hasattr(param, "tp_layout") for options in self.param_groups for param in options["params"]]
        # With a model its census has warned
        if model is None and group is not NOT_GIVEN and all(carried):
            warn_unneeded_group()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, for AdamW if it has ``use_muon=False``.

        Raises:
            ValueError: see the class; nothing has been added.
        """
        whole = {**self.defaults, "use_muon": True, **param_group}
        _check_muon_options(whole)
        super().add_param_group({**param_group, "use_muon": bool(whole["use_muon"])})
        if not whole["use_muon"]:
            return
        start = sum(len(group["params"]) for group in self.param_groups[:-1])
        try:
            for number, param in enumerate(self.param_groups[-1]["params"], start):
                if param.dim() not in (2, 3):
                    raise ValueError(
                        f"params: parameter {number}, of shape {tuple(param.shape)}, must have 2 or 3 dims; pass it in "
                        "adamw_params"
                    )
                if not param.is_floating_point():
                    raise TypeError(f"params: parameter {number} is {param.dtype} and must be of a floating dtype")
                self._placed.layout(param, number)
        # Optimizer has appended the group before its layouts are known
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step; parameters without a gradient stay as they are, and must be the same on all ranks.

        Args:
            closure: as ``torch.optim``.

        Communicates: see the class.

        Raises:
            On all ranks, nothing has changed then: ValueError: ranks with different parameters. RuntimeError: a sparse
            gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices: list[tuple[Tensor, dict[str, Any], int]] = []
        others: list[tuple[list[Tensor], dict[str, Any]]] = []
        number, problem = 0, None
        for group in self.param_groups:
            with_gradient = [param for param in group["params"] if param.grad is not None]
            for param in with_gradient:
                if param.grad.is_sparse:
                    text = f"params: a gradient of shape {tuple(param.shape)} is sparse and must be dense"
                    problem = problem or RuntimeError(text)
            if group["use_muon"]:
                # lr may be a tensor, but alpha of add_ must be a number
                options = {**group, "lr": float(group["lr"])}
                matrices += [(p, options, number + i) for i, p in enumerate(group["params"]) if p.grad is not None]
            elif with_gradient:
                others.append((with_gradient, group))
            number += len(group["params"])
        # Also without any gradient on this rank: the others must learn of it in the exchange
        if any(group["use_muon"] and group["params"] for group in self.param_groups):
            self._step_muon(matrices, problem)
        elif problem is not None:
            raise problem
        for with_gradient, group in others:  # last: until here an error leaves all parameters as they were
            self._step_adamw(with_gradient, group)
        return loss

    def _step_muon(self, matrices: list[tuple[Tensor, dict[str, Any], int]], problem: Exception | None) -> None:
        key = tuple(number for _, _, number in matrices)
        self._check_same_on_all_ranks(key, problem)
        # Other parameters have gradients than at the last step, on all ranks: new buckets
        if key != self._key:
            self._buckets, self._key = self._planned(matrices), key
        params = [local_tensor(param) for param, _, _ in matrices]
        options = [of for _, of, _ in matrices]
        # The matrices of one parameter may be in several buckets; its update is freed after the last one
        last = {index: bucket for bucket in self._buckets for index in bucket.params}
        updates: dict[int, Tensor] = {}
        for bucket in self._buckets:
            for index in bucket.params:
                if index not in updates:
                    # Bucket by bucket, so that not all updates are in memory at once
                    updates[index] = self._momentum(matrices[index][0], options[index])
                    params[index].mul_(1 - options[index]["lr"] * options[index]["weight_decay"])
            with one_thread() if self._in_blocks else contextlib.nullcontext():
                bucket.step(params, updates, options)
            for index in bucket.params:
                if last[index] is bucket:
                    del updates[index]

    def _check_same_on_all_ranks(self, key: tuple[int, ...], problem: Exception | None) -> None:
        """Raises ValueError on all ranks unless they have gradients of the same matrices, by their numbers ``key``:
        else some would exchange shapes while others exchange matrices; or the ``problem`` of a rank."""
        every = [param for group in self.param_groups if group["use_muon"] for param in group["params"]]
        if self._axes is None or self._axes[0] != len(every):  # a group was added
            layouts = [self._placed.layout(param, number)[1] for number, param in enumerate(every)]
            self._axes = len(every), *self._placed.ranks(every, layouts)
        _, axes, device = self._axes
        groups = [process_group(axis.name) for axis in reversed(axes.axes)]
        if axes.size == 1 or not differs_between_ranks((key, repr(problem)), groups, device):
            if problem is not None:
                raise problem
            return
        raise_first(problem, groups)
        keys = all_gather_along([key], groups)  # for the message alone
        some = min(number for key in keys for number in key if any(number not in other for other in keys))
        have = [rank for rank, parameters in enumerate(keys) if some in parameters]
        raise ValueError(
            f"params: the parameters with gradients must be the same on all ranks; parameter {some} has one on {have} "
            f"alone of the {len(keys)} ranks that share the matrices"
        )

    def _momentum(self, param: Tensor, options: dict[str, Any]) -> Tensor:
        """Updates the momentum of a parameter and returns what is orthogonalized of it."""
        assert param.grad is not None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad, memory_format=torch.preserve_format)
        momentum, grad = local_tensor(state["momentum_buffer"]), local_tensor(param.grad)
        momentum.lerp_(grad, 1 - options["momentum"])
        return grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum

    def _planned(self, matrices: list[tuple[Tensor, dict[str, Any], int]]) -> list[MatrixBucket]:
        layouts = [self._placed.layout(param, number) for param, _, number in matrices]
        axes, device = self._placed.ranks((param for param, _, _ in matrices), (layout for _, layout in layouts))
        shards = [shard_of(param, layout) for (param, _, _), (_, layout) in zip(matrices, layouts, strict=True)]
        reports = _shards_of_all(shards, axes)
        # Gram matrices are sums over what each rank holds
        self._in_blocks = any(layout.blocks for _, layout in layouts)
        form = "gather" if self._in_blocks else self._form
        work_options = MuonOptions(axes, device, self._ns_dtype, form, self._bucket_bytes, self._in_blocks)
        steps = [options["ns_steps"] for _, options, _ in matrices]
        return [
            MatrixBucket(assigned, shards, work_options)
            for assigned in buckets(find_matrices(reports, [name for name, _ in layouts]), steps, work_options)
        ]

    def _step_adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        averages, squares, steps = [], [], []
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
                # As torch.optim.AdamW makes them, whose checkpoints so have the same entries
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            averages.append(local_tensor(state["exp_avg"]))
            squares.append(local_tensor(state["exp_avg_sq"]))
            steps.append(state["step"])
        # On local tensors: the update is elementwise, and the dispatch of DTensors would cost the host more
        adamw(
            [local_tensor(param) for param in params],
            [local_tensor(param.grad) for param in params if param.grad is not None],
            averages,
            squares,
            [],
            steps,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _groups(params: Any) -> list[dict[str, Any]]:
    """Returns parameters in a form that ``torch.optim`` takes as groups."""
    if isinstance(params, Tensor):
        raise TypeError(f"params: a tensor of shape {tuple(params.shape)} must be an iterable of parameters or groups")
    groups = list(params)
    if groups and isinstance(groups[0], dict):
        return groups
    return [{"params": groups}]


def _check_muon_options(options: dict[str, Any]) -> None:
    """Raises ValueError unless the options of a group are in their ranges."""
    for name in ("lr", "weight_decay", "momentum", "eps", "adamw_eps"):
        value = options[name]
        number: Any = float(value) if isinstance(value, Tensor) else value
        check_number(**{name: number})
        if value < 0:
            raise ValueError(f"{name}: {value!r} must be at least 0")
    for name in ("ns_coefficients", "betas"):
        if not isinstance(options[name], tuple | list):
            raise TypeError(f"{name}: {options[name]!r} must be a tuple of numbers")
        check_number(**{f"{name}[{i}]": value for i, value in enumerate(options[name])})
    check_bool(nesterov=options["nesterov"])
    if not isinstance(options["ns_steps"], int) or not 0 <= options["ns_steps"] < 100:
        raise ValueError(f"ns_steps: {options['ns_steps']!r} must be an integer of at least 0 and less than 100")
    if len(options["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients: {options['ns_coefficients']!r} must be three numbers")
    check_choice(_RATES, adjust_lr_fn=options["adjust_lr_fn"])
    if len(options["betas"]) != 2 or not all(0 <= beta < 1 for beta in options["betas"]):
        raise ValueError(f"betas: {options['betas']!r} must be two numbers in [0, 1)")


def _shards_of_all(shards: list[ShardOf], axes: DataAxes) -> list[list[ShardOf]]:
    """Returns the shards of all ranks, in the order of their numbers.

    Communicates: one exchange of objects over each axis.
    """
    reports = [shards]
    for axis in reversed(axes.axes):
        gathered: Iterable[list[list[ShardOf]]] = all_gather_objects(reports, process_group(axis.name))
        reports = [report for of_rank in gathered for report in of_rank]
    return reports
