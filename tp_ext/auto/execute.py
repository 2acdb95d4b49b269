"""A plan, carried out on a model in place: leaves replaced, parameters sharded, integers set, collectives at
boundaries."""

from __future__ import annotations

from copy import copy as shallow_copy
from typing import Any

from torch import nn

from tp_ext.auto.argument_checks import check_apply
from tp_ext.auto.check_applied import compare_with, reference_of
from tp_ext.auto.fits import compare_over_group, misfit
from tp_ext.auto.guard import Guard, structure_of
from tp_ext.auto.module_state import Baseline
from tp_ext.auto.modules.block_functions import function_edits
from tp_ext.auto.modules.block_layers import BlockConv1D, layer_norm
from tp_ext.auto.modules.boundary_edits import (
    Converted,
    ConvertedArgument,
    ConvertedOutput,
    CopiedArguments,
    EnteredParameters,
    NoAdapters,
)
from tp_ext.auto.modules.call_edits import GatheredResults
from tp_ext.auto.modules.copied import HOOKS, before_edits, keep_edits
from tp_ext.auto.modules.direct_calls import convert_direct_calls
from tp_ext.auto.modules.leaves import EnteredColumnLinear, RowConv1D, RowTokensLinear, fused_norm, shard_embedding
from tp_ext.auto.modules.logits import FullLogits, LogitsInShards
from tp_ext.auto.modules.random_draws import draw_edits, register_draws
from tp_ext.auto.modules.summed_calls import summed_call_edits
from tp_ext.auto.modules.token_lengths import KeptLength, TokenLengths, TokensOfForward
from tp_ext.auto.moved import keep_names
from tp_ext.auto.record.boundary import Edit, EditsOfModules, install
from tp_ext.auto.record.edits import Conversion
from tp_ext.auto.record.forwards import CalledForward
from tp_ext.auto.record.multi_head import WEIGHTS, shard_attention
from tp_ext.auto.search.integers import local_of
from tp_ext.auto.search.localize import is_conv1d, patch
from tp_ext.auto.search.plans import Plan
from tp_ext.auto.search.sizes import SizedForward
from tp_ext.conversions import I, P, R, S
from tp_ext.group import Group, ParallelGroup, parallel_group
from tp_ext.invariance import using_blocks
from tp_ext.model.fused_paths import refuse_fused_paths
from tp_ext.model.layer_shares import know_that_they_agree
from tp_ext.model.layouts import carry_attributes, carry_gradient, declare_layouts, layouts_of
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.outside.live_shards import Replaced
from tp_ext.sharding import Layout
from tp_ext.share_sizes import Shares, using_shares


def apply_quietly(
    plan: Plan, model: nn.Module, group: Group, *, verify: bool = False, example: Any = None, problem: str = ""
) -> nn.Module:
    """Shards a model by a plan, as :func:`tp_ext.auto.apply`, without its warning.

    ``problem``: an error of this rank, which is raised on all.
    """
    check_apply(plan, model, verify, example)
    parallel = parallel_group(group)
    if plan.p != parallel.size:
        raise ValueError(f"plan: is for p = {plan.p} and must be for the {parallel.size} ranks of the group")
    compare_over_group(plan, model, group, problem)
    reference = reference_of(plan, model) if verify else None  # a copy of the full weights
    full = [*model.parameters()]
    _carry_out(plan, model, parallel)
    # Here alone: no optimizer has parameters of a proof, after which each would look at its own again
    kept = set(map(id, model.parameters()))
    Replaced.add(parameter for parameter in full if id(parameter) not in kept)
    if reference is not None:
        compare_with(model, reference, example, group)
    return model


def apply_in_proof(plan: Plan, model: nn.Module, group: Group) -> nn.Module:
    """Shards a model on the ranks of a proof, which have one plan and copies of one model: nothing is compared."""
    if problem := misfit(plan, model):
        raise ValueError(f"model: {problem}")
    _carry_out(plan, model, parallel_group(group))
    return model


def _carry_out(plan: Plan, model: nn.Module, parallel: ParallelGroup) -> None:
    before = before_edits(model)
    if parallel.size > 1 or plan.invariant_blocks is not None:
        structure = None
        if plan.shardings and plan.example is not None:
            keep_names(model)
            structure = structure_of(model)
        shares = None if plan.shares is None else Shares(plan.shares, tokens=False)  # tokens have sizes of their own
        with using_blocks(plan.invariant_blocks), using_shares(shares):
            _Applied(plan, model, parallel).apply(structure is not None)
        know_that_they_agree(model)  # the shares are the plan's
        if structure is not None:
            # Its proofs, too, have one plan and copies of one model on all ranks, and no calls to compare: their plan
            # has no digests of calls, which have just been found right
            guard = Guard(plan, structure, apply_in_proof, parallel, Baseline.of(model))
            model.register_forward_pre_hook(guard, prepend=True, with_kwargs=True)
        if parallel.size > 1 and hasattr(model, "save_pretrained"):
            model.save_pretrained = _refuse_to_save  # type: ignore[assignment]
    else:
        _Applied(plan, model, parallel).apply_alone()
    model.tp_ext_plan = plan  # type: ignore[assignment]
    keep_edits(model, before)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Replaces a method of transformers that would write the shards of a rank."""
    raise RuntimeError("save_pretrained: the model is sharded; call tp_ext.huggingface.save_pretrained(model, path)")


class _Applied:
    def __init__(self, plan: Plan, model: nn.Module, group: ParallelGroup) -> None:
        self.plan, self.model, self.group = plan, model, group
        self.old = dict(model.named_parameters(remove_duplicate=False))
        self.names: dict[nn.Module, list[str]] = {}  # of the modules that stand for those of the model
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        self.edits: EditsOfModules = {}
        self.new: dict[int, nn.Parameter] = {}  # by id of the full one, so that tied ones stay tied
        self.entered_copied: dict[str, list[str]] = {}  # module -> parameters with rows that other ranks hold
        self.tokens = TokenLengths(group, shares=plan.shares) if plan.tokens else None
        self.scattered = {edit.module: edit.dim for edit in plan.tokens if edit.types == (P, S)}

    def apply(self, is_guarded: bool) -> None:
        own_input = {copy.module for copy in self.plan.copies if self.sums_own_input(copy)}
        # Linear layers first: they make shards of their own, which tied parameters of other modules then take
        for name, role in self.plan.roles.items():
            if isinstance(self.model.get_submodule(name), nn.Linear):
                self.replace_linear(name, role, name in own_input)
        for name in self.plan.shardings:
            self.shard_in_place(name)
        for name, role in self.plan.roles.items():
            module = self.model.get_submodule(name)
            if role == "attention":
                self.shard_attention(name)
                continue
            sharding = self.plan.shardings[f"{name}.weight"]
            if role == "vocab":
                shard_embedding(module, sharding, self.group)
            elif is_conv1d(module) and self.plan.invariant_blocks is not None:
                self.replace(name, BlockConv1D(module, sharding, self.group, self.plan.invariant_blocks))
            elif is_conv1d(module) and role == "row":
                weight = module._parameters["weight"]
                assert weight is not None
                self.replace(name, RowConv1D(module, weight, sharding, self.group))
            elif is_conv1d(module):
                module.nf = module.weight.shape[1]  # type: ignore[assignment, index]
            if name in self.scattered:
                layer = self.model.get_submodule(name)
                layer.tp_tokens, layer.tp_tokens_dim = self.tokens, self.scattered[name]  # type: ignore[assignment]
        for name in self.plan.roles if self.plan.shares is not None else ():
            self.model.get_submodule(name).shares = self.plan.shares  # type: ignore[assignment]
        refuse_fused_paths(self.model, list(self.plan.shardings))
        self.shard_buffers()
        self.fuse_norms()
        patch(self.model, local_of(self.plan.patches, self.plan.sizes, self.group.rank).patches)
        self.edit_calls(own_input, is_guarded)
        for module, edits in self.edits.items():
            install(module, edits)

    def apply_alone(self) -> None:
        """Applies the part of a plan that one rank needs: linears for adapters, masks of any number of ranks."""
        for name, role in self.plan.roles.items():
            self.shard_attention(name) if role == "attention" else self.replace_linear(name, role, False)
        register_draws(self.model, self.plan.draws, self.group)

    def sums_own_input(self, copy: Conversion) -> bool:
        """Returns whether a copy serves the input of one column layer alone, which sums dx under its own GEMM."""
        is_column = copy.at == "argument" and self.plan.roles.get(copy.module) == "column"
        return is_column and isinstance(self.model.get_submodule(copy.module), nn.Linear)

    # ------------------------------------------------------------ parameters

    def shard_attention(self, name: str) -> None:
        of_heads = next(f"{name}.{weight}" for weight in WEIGHTS if f"{name}.{weight}" in self.plan.shardings)
        shard_attention(self.model.get_submodule(name), self.plan.shardings[of_heads], self.group)

    def replace(self, name: str, layer: nn.Module) -> None:
        """Puts a layer in a module's place, under all its names, with its hooks and what else it has."""
        old = self.model.get_submodule(name)
        layer.train(old.training)
        for hooks in HOOKS:
            getattr(layer, hooks).update(getattr(old, hooks))
        # Forward code reads attributes that the layer's own class does not have
        for key, value in old.__dict__.items():
            layer.__dict__.setdefault(key, value)
        # Code may call the module by any of its names
        self.names[layer] = self.names.pop(old)
        for other in self.names[layer]:
            self.model.set_submodule(other, layer)

    def fuse_norms(self) -> None:
        """Replaces RMS norms on replicated tokens; their weights need no gradient sum."""
        entered = {copy.module for copy in self.plan.copies if copy.at == "parameter"}
        for name, module in list(self.model.named_modules()):
            is_whole = name not in entered and f"{name}.weight" in self.plan.whole
            norm: nn.Module | None = fused_norm(module) if is_whole else None
            if is_whole and norm is None and self.plan.invariant_blocks is not None:
                norm = layer_norm(module)
            if norm is not None:
                self.replace(name, norm)

    def replace_linear(self, name: str, role: str, own_input: bool) -> None:
        linear = self.model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        own_input = own_input or self.plan.invariant_blocks is not None  # a tree for each layer, in every case
        column = ColumnParallelLinear if own_input else EnteredColumnLinear
        row = RowTokensLinear if name in self.scattered else RowParallelLinear
        cls = column if role == "column" else row
        parts = self.plan.shardings[f"{name}.weight"].parts
        if self.group.size == 1:  # with the parameters that it has: an optimizer may know them
            bias, dtype = linear.bias is not None, linear.weight.dtype
            sizes = linear.in_features, linear.out_features
            alone = cls(*sizes, bias, group=self.group.name or None, parts=parts, device="meta", dtype=dtype)
            alone._parameters.update(linear._parameters)
            self.replace(name, alone)
            return
        dense = shallow_copy(linear)
        if (whole := linear._parameters.get("bias")) is not None and f"{name}.bias" not in self.plan.shardings:
            # It stays the parameter that it is, with its hooks, which a conversion refuses
            without_hooks = nn.Parameter(whole.detach(), requires_grad=whole.requires_grad)
            dense._parameters = {**linear._parameters, "bias": without_hooks}
        layer = cls.from_linear(dense, group=self.group.name, parts=parts)
        for attribute in ("weight", "bias"):
            parameter = layer._parameters.get(attribute)
            if parameter is None:
                continue
            full = self.old[f"{name}.{attribute}"]
            if f"{name}.{attribute}" not in self.plan.shardings:
                layer._parameters[attribute] = full  # a row layer's bias: replicated, maybe tied
            elif self.new.setdefault(id(full), parameter) is not parameter:
                setattr(layer, attribute, self.new[id(full)])
            else:
                carry_gradient(parameter, full, layer.tp_layouts[attribute])
        self.replace(name, layer)

    def shard_in_place(self, name: str) -> None:
        owner, _, attribute = name.rpartition(".")
        module, sharding, full = self.model.get_submodule(owner), self.plan.shardings[name], self.old[name]
        if attribute in layouts_of(module):
            return  # of a layer that has been replaced
        if id(full) not in self.new:
            alone = self.group.size == 1  # with the parameter that it is: an optimizer may know it
            self.new[id(full)] = full if alone else self.sharded(full, Layout((sharding, self.group)))
        module._parameters[attribute] = self.new[id(full)]
        declare_layouts(module, {attribute: Layout((sharding, self.group))})
        if any(part.copies > 1 for part in sharding.parts):
            self.entered_copied.setdefault(owner, []).append(attribute)

    def sharded(self, full: nn.Parameter, layout: Layout) -> nn.Parameter:
        shard = nn.Parameter(layout.shard(full.detach()), requires_grad=full.requires_grad)
        carry_attributes(shard, full, layout)
        carry_gradient(shard, full, layout)
        return shard

    def shard_buffers(self) -> None:
        buffers = dict(self.model.named_buffers())
        for name, shardings in self.plan.buffers.items():
            owner, _, attribute = name.rpartition(".")
            module, buffer = self.model.get_submodule(owner), buffers[name]
            for sharding in shardings:
                full, layout = buffer, Layout((sharding, self.group))
                buffer = layout.shard(full)
                carry_attributes(buffer, full, layout)
            module._buffers[attribute] = buffer
            declare_layouts(module, {attribute: Layout((shardings[0], self.group))})

    # ------------------------------------------------------------ edits of calls

    def edit(self, name: str, edit: Edit) -> None:
        self.edits.setdefault(self.model.get_submodule(name), []).append(edit)

    def edit_calls(self, own_input: set[str], is_guarded: bool) -> None:
        """Collects what modules do around their forwards, in any order: that of running is ``EditPlace``."""
        plan, group = self.plan, self.group
        self.edit("", NoAdapters())
        if self.tokens is not None:
            self.edit("", TokensOfForward(self.tokens))
        copied: dict[tuple[str, bool], CopiedArguments] = {}
        for conversion in plan.conversions:
            tokens = self.tokens if conversion.tokens else None
            if conversion.types == (S, S):
                assert tokens is not None
                self.edit(conversion.module, KeptLength(conversion.path, tokens))
            elif conversion.at == "argument" and conversion.types == (I, R):
                key = conversion.module, conversion.tokens
                if conversion.module not in own_input:
                    copied.setdefault(key, CopiedArguments([], group, tokens)).paths.append(conversion.path)
            elif conversion.at == "argument":
                self.edit(conversion.module, ConvertedArgument(Converted(conversion, group, tokens)))
            elif conversion.at == "output" and not self.is_converted_elsewhere(conversion):
                self.edit(conversion.module, ConvertedOutput(Converted(conversion, group, tokens)))
        for (name, _), arguments in copied.items():
            self.edit(name, arguments)
        self.enter_parameters()
        for name, edit in draw_edits(plan.draws, group, self.tokens):
            self.edit(name, edit)
        for name in plan.heads:
            sizes = tuple(plan.shardings[f"{name}.weight"].local_sizes(group.size))
            self.edit(name, LogitsInShards(group, sizes, plan.invariant_blocks))
        if plan.heads:
            self.edit("", FullLogits())
        if plan.gathers or plan.example is not None:  # a guard may find gathers of other calls
            self.edit("", GatheredResults(plan.gathers, group))
        for name, edit in function_edits(self.model, plan.functions) if plan.invariant_blocks is not None else ():
            self.edit(name, edit)
        for inner, sums in summed_call_edits(self.model, [e for e in plan.conversions if e.at == "call"], group):
            self.edits.setdefault(inner, []).append(sums)
        local = local_of(plan.patches, plan.sizes, group.rank)
        for name, calls in local.sizes.items():
            for inner, pause in SizedForward(self.model.get_submodule(name), name, calls).install():
                self.edits.setdefault(inner, []).append(pause)
        convert_direct_calls(self.model, plan, group, self.edits, is_guarded)
        for name in plan.direct:
            # Last: it wraps the other forwards of the instance, so that a call by name runs the hooks and then these
            self.edit(name, CalledForward(self.model.get_submodule(name)).install())

    def is_converted_elsewhere(self, edit: Conversion) -> bool:
        """Returns whether a layer converts an output itself, or the model its results, which depend on the call."""
        if edit.of_tokens:
            return edit.module in self.plan.roles
        return edit.types == (S, I) or (edit.types == (P, I) and edit.module in self.scattered)

    def enter_parameters(self) -> None:
        entering: dict[str, EnteredParameters] = {}
        for copy in self.plan.copies:
            if copy.at == "parameter":
                edit = entering.setdefault(copy.module, EnteredParameters(self.group, tokens=self.tokens))
                edit.divided[str(copy.path[0])] = copy.after is P
                if copy.tokens:
                    edit.on_tokens.add(str(copy.path[0]))
        for owner, names in self.entered_copied.items():
            edit = entering.setdefault(owner, EnteredParameters(self.group))
            for attribute in names:
                sharding = self.plan.shardings[f"{owner}.{attribute}"]
                rows = sharding.copied_rows(self.group.rank, self.group.size)
                assert rows is not None
                edit.copied[attribute] = sharding.dim, rows
        for name, edit in entering.items():
            self.edit(name, edit)
