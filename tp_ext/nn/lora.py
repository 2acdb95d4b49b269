"""Low-rank adapters on tensor-parallel linears: y = x W^T + b + (alpha / r) x A^T B^T, with W and b frozen.

======  ==================  ==================  ==================================  =================================
base    A ``[r, in]``       B ``[out, r]``      added forward                       added backward
======  ==================  ==================  ==================================  =================================
column  replicated          as W, dim 0         nothing                             all-reduce of tokens x r
column  the same if ``tp_ext.auto`` sums x's     nothing                             all-reduce of dA
        gradient once for several layers
row     as W, dim 1         replicated          all-reduce of tokens x r            nothing
column  the same under SP                       all-gather of tokens x r            reduce-scatter and all-gather of
                                                                                    tokens x r, all-reduce of dA
row     the same under SP                       reduce-scatter of tokens x r        all-gather of tokens x r,
                                                                                    all-reduce of dB
======  ==================  ==================  ==================================  =================================

Both factors are layers of this package: every gradient is complete when ``backward()`` returns, and all additional
communication is r wide.

Hu et al., "LoRA: Low-rank adaptation of large language models" (arXiv:2106.09685).
"""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext._checks import check_int, check_number, check_probability
from tp_ext._object_collectives import check_same_names
from tp_ext.group import process_group
from tp_ext.model.layer_shares import shares_of
from tp_ext.model.layouts import refuse_computed, refuse_wrapped
from tp_ext.model.module import ParallelModule
from tp_ext.model.names import name_modules
from tp_ext.nn.dropout import layer_dropout
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.nn.lora_weight import LoRAWeight
from tp_ext.nn.low_bits import LowBits, QuantizedLinear
from tp_ext.nn.replicated_linear import ReplicatedLinear
from tp_ext.random import Constant, torch_linear_init
from tp_ext.sharding import Sharding

_BASES = ColumnParallelLinear | RowParallelLinear | QuantizedLinear


# [Note: adapters consist of our layers]
class LoRALinear(ParallelModule):
    """Replacement of a column or row linear by one with an adapter: y = base(x) + (alpha / r) B(A(dropout(x))).

    Shapes, options and return values (``skip_bias_add``, ``gather_output``, ``input_is_parallel=False``) are the
    base layer's. State-dict names are peft's: ``base_layer.weight``, ``lora_A.weight`` ``[r, in]``, ``lora_B.weight``
    ``[out, r]``. B follows the parts of the base (q | k | v, copied KV heads).

    Communicates as the base layer, and r-wide tensors: see :mod:`tp_ext.nn.lora`. No activation is saved for the frozen
    weight.

    Args:
        base: the layer, quantised or not (:func:`tp_ext.low_precision.quantize_`); its parameters are frozen. Device
            and dtype of the adapter are its weight's.
        r: the rank.
        alpha: the adapter is scaled by alpha / r.
        dropout: probability for the adapter's input; the masks are those of the unsharded model.

    A is initialised as ``nn.Linear`` (Kaiming-uniform with a = sqrt(5), as peft), the same for every p; B with zeros.

    Raises:
        TypeError: ``base`` is no column or row linear. ValueError: ``r`` is no positive integer, ``alpha`` is not
            positive, ``dropout`` no probability below 1; ``base`` was built in :func:`tp_ext.tp_invariant`.
    """

    def __init__(
        self,
        base: ColumnParallelLinear | RowParallelLinear | QuantizedLinear,
        r: int,
        *,
        alpha: float,
        dropout: float = 0.0,
    ) -> None:
        _check_base("base", base)
        _check_options(r, alpha, dropout)
        group = base.tp_group.name or None
        with shares_of(base):
            super().__init__(group, sequence_parallel=base.sequence_parallel)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.r, self.scaling, self.dropout, self.merged, self.disabled = r, alpha / r, dropout, False, False
        self.base_layer = base.requires_grad_(False)
        # Input and output are scattered and gathered once, here, not by base and adapter each
        self.gathers = isinstance(base, ColumnParallelLinear) and base.gather_output
        self.scatters = isinstance(base, RowParallelLinear) and not base.input_is_parallel
        options: dict[str, Any] = {
            "group": group,
            "sequence_parallel": base.sequence_parallel,
            **base.weight_options,
        }
        with shares_of(base):
            self._add_factors(base, r, options)

    def _add_factors(self, base: Any, r: int, options: dict[str, Any]) -> None:
        sharding = base.weight_layout[0][0]
        first, last = torch_linear_init(base.in_features), Constant(0.0)
        if not isinstance(base, RowParallelLinear):
            if self.gathers:
                base.gather_output = False
            self.lora_A: nn.Module = ReplicatedLinear(base.in_features, r, False, init=first, **options)
            column: Any = type(base) if self._is_entered else ColumnParallelLinear
            self.lora_B: nn.Module = column(r, base.out_features, False, parts=sharding.parts, init=last, **options)
        else:
            base.input_is_parallel = True
            # Of the base's class: one that scatters tokens by a plan of tp_ext.auto has an A that does so, too
            self.lora_A = type(base)(base.in_features, r, bias=False, parts=sharding.parts, init=first, **options)
            for name in ("tp_tokens", "tp_tokens_dim"):
                if hasattr(base, name):
                    setattr(self.lora_A, name, getattr(base, name))
            self.lora_B = ReplicatedLinear(r, base.out_features, False, init=last, **options)

    @property
    def _is_entered(self) -> bool:
        return getattr(self.base_layer, "input_gradient_is_summed_elsewhere", False)

    @property
    def weight_options(self) -> dict[str, Any]:
        """The device and the dtype of the weight."""
        return self.base_layer.weight_options

    def forward(self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None) -> Any:
        """Returns a tensor, or with ``skip_bias_add`` ``(y, bias)``.

        Args:
            x, total_tokens, weight: as the base layer's.
        """
        base = self.base_layer
        if self.scatters:
            assert isinstance(base, RowParallelLinear)
            x = base.scattered(x)
        y = base(x, total_tokens, weight=weight)
        y, bias = y if base.skip_bias_add else (y, None)
        if not (self.merged or self.disabled):
            # Where x's gradient is summed elsewhere, B leaves its term of it partial, and A must sum that of its weight
            partial = {"has_own_tokens": True} if self._is_entered else {}
            inner = self.lora_A(self._dropped(x, total_tokens), total_tokens, **partial)
            tokens = getattr(base, "tp_tokens", None)
            options = {"has_own_tokens": True} if tokens is not None and tokens.sizes() is not None else {}
            y = y + self.lora_B(inner * self.scaling, total_tokens, **options)
        if self.gathers:
            assert isinstance(base, ColumnParallelLinear)
            y = base.gathered(y)
        return (y, bias) if base.skip_bias_add else y

    def _dropped(self, x: Tensor, total_tokens: int | None) -> Tensor:
        if not self.training or not self.dropout:
            return x
        _, p, rank = self.tp_group
        if not isinstance(self.base_layer, RowParallelLinear):
            sharded = self.sequence_parallel and p > 1
            sizes = self.token_sizes(total_tokens)
            return layer_dropout(self, x, self.dropout, dim=0 if sharded else None, sizes=sizes)
        sharding = self.base_layer.weight_layout[0][0]
        dropped = []
        for share, part in zip(_split_parts(x, Sharding(-1, sharding.parts), rank, p), sharding.parts, strict=True):
            whole = Sharding(-1, (part,))
            sizes = [span.stop - span.start for q in range(p) for span in whole.slices(q, p)]  # without padding
            kept = layer_dropout(self, share[..., : sizes[rank]], self.dropout, dim=-1, sizes=sizes)
            dropped.append(F.pad(kept, (0, share.shape[-1] - sizes[rank])) if part.padding else kept)
        return dropped[0] if len(dropped) == 1 else torch.cat(dropped, -1)

    def merge(self) -> None:
        """Adds the adapter to the base weight, W += (alpha / r) B A, which is then used alone. Communicates nothing.
        A merged layer has no state dict, and loads none.

        Raises:
            ValueError: it is already merged, FSDP2 has sharded the weights, or the base's weight was quantised or is
                computed (``weight_norm``, pruning, a parametrization).
        """
        self._add(1, merged=True)

    def unmerge(self) -> None:
        """Inverts :meth:`merge`, up to rounding. Raises ValueError: it is not merged."""
        self._add(-1, merged=False)

    @torch.no_grad()
    def _add(self, sign: int, *, merged: bool) -> None:
        if isinstance(self.base_layer.form, LowBits):
            raise ValueError("base_layer: its weight was quantised, and merging would round it again")
        refuse_computed("base_layer", self.base_layer, "weight")  # the next forward would compute it anew
        weight, a, b = self.base_layer.weight, self.lora_A.weight, self.lora_B.weight
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        if self.merged == merged:
            raise ValueError(f"merged: is {merged} already")
        if isinstance(weight, DTensor):
            raise ValueError("base_layer.weight: a DTensor must not be merged into; merge in a model without FSDP2")
        self.add_product_(weight, a, b, sign)
        self.merged = merged

    @torch.no_grad()
    def add_product_(self, weight: Tensor, a: Tensor, b: Tensor, sign: int = 1) -> None:
        """Adds sign (alpha / r) B A to this rank's shard of the weight, of these factors."""
        sharding = self.base_layer.weight_layout[0][0]
        _, p, rank = self.tp_group
        column = sharding.dim == 0
        factor = _split_parts(b if column else a, sharding, rank, p)
        # Part by part: ranks with copies then multiply them in the same shape, to the same bits
        for target, share in zip(_split_parts(weight, sharding, rank, p), factor, strict=True):
            left, right = (share, a) if column else (b, share)
            wide = torch.promote_types(weight.dtype, torch.float32)
            target.copy_(target + sign * self.scaling * (left.to(wide, copy=True) @ right.to(wide)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._refuse_merged(prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._refuse_merged(prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _refuse_merged(self, prefix: str) -> None:
        """Raises a ValueError if the base weight has the adapter in it, of which the names of a state say nothing: a
        layer that loads it would add the adapter again."""
        if self.merged:
            raise ValueError(
                f"{prefix.removesuffix('.') or 'LoRALinear'}: must not be merged where its state is saved or loaded: "
                "unmerge() it, or tp_ext.merge_lora(model), whose states have no adapter"
            )

    def extra_repr(self) -> str:
        return f"r={self.r}, scaling={self.scaling}, dropout={self.dropout}, merged={self.merged}"


def _split_parts(tensor: Tensor, sharding: Sharding, rank: int, p: int) -> tuple[Tensor, ...]:
    """Returns views of the rank's share of each part of a local tensor."""
    lengths = [part.length + part.padding for part in sharding.local_parts(rank, p)]
    return tensor.split(lengths, sharding.dim)


def add_lora(
    model: nn.Module,
    *,
    targets: str | Iterable[str],
    r: int,
    alpha: float,
    dropout: float = 0.0,
    freeze: bool = True,
) -> list[str]:
    """Replaces each column or row linear that ``targets`` names by a :class:`LoRALinear`.

    Args:
        targets: one or more shell patterns; each is matched with the whole name of a layer (``"blocks.0.*.qkv"``) and
            with every suffix of it after a dot (``"qkv"``, ``"mlp.*"``).
        r, alpha, dropout: as :class:`LoRALinear`.
        freeze: freezes all parameters of the model but adapters; pass the optimizer those that require gradients.

    Returns:
        The names of the layers.

    Communicates an all-gather of objects over each group of the model's column and row linears. Raises:
        ValueError, TypeError, on all ranks, nothing has changed then: a pattern that names no such layer; DDP or FSDP2
            have the model already; other layers, or other options, on another rank; and see :class:`LoRALinear`.
    """
    patterns = [targets] if isinstance(targets, str) else list(targets)
    chosen = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if name and isinstance(module, _BASES) and any(_matches(name, pattern) for pattern in patterns)
    ]
    linears = {name: module for name, module in model.named_modules() if name and isinstance(module, _BASES)}
    groups = dict.fromkeys(linear.tp_group.name for linear in linears.values() if linear.tp_group.size > 1)
    problem: Exception | None = None
    try:
        refuse_wrapped(model, "add adapters")
        # A misspelled pattern would leave its layers without an adapter, and frozen
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in chosen):
                raise ValueError(
                    f"targets: {pattern!r} must name a ColumnParallelLinear or RowParallelLinear inside the model; it "
                    f"has {sorted({name.rpartition('.')[2] for name in linears})}"
                )
        _check_options(r, alpha, dropout)
        for name in chosen:  # before one is replaced
            _check_base(name, model.get_submodule(name))
    except (TypeError, ValueError) as error:
        problem = error
    # Each layer then draws its factors, for which the ranks meet
    options = {"r": r, "alpha": alpha, "dropout": dropout, "freeze": freeze}
    check_same_names("targets", chosen, map(process_group, groups), problem, **options)
    if freeze:
        adapters = {p for _, layer in _lora_layers(model) for n, p in layer.named_parameters() if n.startswith("lora_")}
        for param in set(model.parameters()) - adapters:
            param.requires_grad_(False)
    wrapped: dict[nn.Module, LoRALinear] = {}  # a layer that is used in two places remains one layer
    for name in chosen:
        base = model.get_submodule(name)
        if isinstance(base, LoRALinear):  # in a block that is used in two places
            continue
        assert isinstance(base, _BASES)
        if base not in wrapped:
            wrapped[base] = LoRALinear(base, r, alpha=alpha, dropout=dropout).train(base.training)
            if base_name := base.__dict__.get("tp_name"):
                name_modules(wrapped[base], prefix=base_name)
        model.set_submodule(name, wrapped[base])
    return chosen


def merge_lora(model: nn.Module) -> list[str]:
    """Merges every adapter of the model and restores the base layers, with the names before :func:`add_lora`; returns
    the names of the layers. They stay frozen.

    Raises:
        ValueError: there is no adapter inside the model, or one of a weight (:func:`tp_ext.huggingface.load_adapter`);
            a weight is another layer's, too; see :meth:`LoRALinear.merge`.
    """
    names, layers = [], [(name, layer) for name, layer in _lora_layers(model) if name]
    if not layers:
        raise ValueError(f"model: {type(model).__name__} must hold a LoRALinear inside")
    if any(isinstance(module, LoRAWeight) for module in model.modules()):
        raise ValueError(
            "model: must not have adapters of weights (Conv1D, embeddings, experts, DoRA), which stay separate; "
            "tp_ext.huggingface.weight_source gives merged weights"
        )
    weights = [id(weight) for m in model.modules() if (weight := m._parameters.get("weight")) is not None]
    for name, layer in layers:
        if weights.count(id(layer.base_layer._parameters.get("weight"))) > 1 and not layer.merged:
            raise ValueError(f"{name}: its weight is another layer's, too, which would get the adapter; untie before")
    for name, layer in layers:
        if not layer.merged:
            layer.merge()
        base = layer.base_layer
        if layer_name := layer.__dict__.get("tp_name"):
            name_modules(base, prefix=layer_name)
        if isinstance(base, ColumnParallelLinear):
            base.gather_output = layer.gathers
        elif isinstance(base, RowParallelLinear):
            base.input_is_parallel = not layer.scatters
        model.set_submodule(name, base)
        names.append(name)
    return names


def _check_options(r: int, alpha: float, dropout: float) -> None:
    check_int(least=1, r=r)
    check_number(above=0, alpha=alpha)
    check_probability(dropout=dropout)


def _check_base(name: str, base: Any) -> None:
    """Raises TypeError or ValueError unless a layer can get an adapter."""
    if not isinstance(base, _BASES):
        raise TypeError(
            f"{name}: {type(base).__name__} must be a ColumnParallelLinear or a RowParallelLinear; of the model's "
            "own layers those are qkv, out, up and down"
        )
    if any(isinstance(param, DTensor) for param in base.parameters()):
        raise ValueError(f"{name}: must not be sharded by FSDP2, which would not know the adapter; add adapters before")
    if base.form.without_adapter:
        raise ValueError(f"{name}: {base.form.without_adapter}")
    if any(getattr(hook, "is_of_input", False) for hook in base._forward_pre_hooks.values()):
        raise ValueError(f"{name}: gathers tokens itself, by a plan; plan with sequence_parallel=False for its adapter")


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LoRALinear):
            yield name, module


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
