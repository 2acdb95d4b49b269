"""Lengths of tokens in sequence parallelism: whether they are sharded in a forward, and how long they are.

Whether tokens are sharded is decided in each forward, by what is the same on all ranks: gradients are recorded, there
are at least p tokens, and the guard has not found that the call needs them whole. So a model that generates text token
by token computes as without sequence parallelism. The length of the tokens is that of the run; p need not divide it.
Recomputation in backward (gradient checkpointing) finds the length by the arguments, which are those of the forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tp_ext.auto.record.boundary import Edit, EditPlace
from tp_ext.auto.record.edits import LeafPath, edits_of
from tp_ext.auto.record.record import tensors
from tp_ext.auto.search.localize import argument_path, leaf_at
from tp_ext.group import ParallelGroup
from tp_ext.share_sizes import Weights, split_sizes

MAX_KNOWN = 4096  # storages, beyond which those that are gone are dropped


@dataclass
class TokenLengths:
    """The full length of the tokens that were sharded last, for all edits of a model.

    Attributes:
        length: None: they are whole. forwards: of the model that run now. records: the running one records gradients,
        and may shard tokens. backward: the one in which a recomputation last set the length. whole: that of a call
        which must not shard tokens.
        known: storage of an argument -> the length of its tokens. shares: by which the ranks share tokens.
    """

    group: ParallelGroup
    length: int | None = None
    forwards: int = 0
    records: bool = False
    backward: int = -1
    whole: int = -1
    known: dict[int, tuple[StorageWeakRef, int | None]] = field(default_factory=dict, repr=False)
    shares: Weights | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(TokenLengths(self.group, shares=self.shares))  # of no run

    def enter(self, length: int) -> list[int] | None:
        """Begins to shard tokens of a full length; returns the lengths on the ranks, None: they stay whole."""
        shards = self.records
        # No forward of the model runs: backward recomputes this module, or other code calls it
        if not self.forwards:
            self.backward = _backward()
            shards = self.backward >= 0 and self.backward != self.whole
        shards = shards and length >= self.group.size
        if shards and self.shares is not None:  # by which a rank may have none of few tokens
            shards = all(split_sizes(length, self.group.size, self.shares))
        self.length = length if shards else None
        return self.sizes()

    def sizes(self) -> list[int] | None:
        """Returns the lengths on the ranks of the tokens that were sharded last, None: they are whole."""
        return None if self.length is None else split_sizes(self.length, self.group.size, self.shares)

    def sizes_of(self, x: Tensor, dim: int) -> list[int] | None:
        """Returns :meth:`sizes` for a tensor that is sharded unless its tokens are whole.

        Raises:
            RuntimeError: it is not as long as this rank's shard.
        """
        sizes = self.sizes()
        if sizes is not None and x.shape[dim] != sizes[self.group.rank]:
            raise RuntimeError(
                f"sequence parallelism: a tensor has {x.shape[dim]} tokens on rank {self.group.rank} and must have "
                f"{sizes[self.group.rank]}, its share of {self.length}"
            )
        return sizes

    def remember(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if len(self.known) > MAX_KNOWN:
            self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        # By storage: a checkpoint detaches its arguments, so that a recomputation has other tensors of the same memory
        self.known[storage._cdata] = StorageWeakRef(storage), self.length

    @torch.compiler.disable
    def recall(self, x: Tensor) -> None:
        """Sets the length of the tokens of an argument of a module that runs outside of a forward of the model."""
        backward = _backward()
        if backward < 0:
            self.length = None  # a module called by itself has whole arguments
            return
        known = self.known.get(x.untyped_storage()._cdata)
        if known is None or known[0].expired():
            if self.backward == backward:
                return  # computed by the recomputation itself
            raise RuntimeError(
                "sequence parallelism: a module is recomputed in backward from arguments that its forward did not "
                "have; compile what contains the checkpoint, or nothing, and keep its arguments where they are"
            )
        self.length, self.backward = known[1], backward


@torch.compiler.disable
def _backward() -> int:
    """Returns the id of the backward that runs now, -1: none."""
    return torch._C._current_graph_task_id()


@dataclass
class TokensOfForward(Edit):
    """Decides whether this forward of the model shards tokens; a stage of a pipeline would silently keep all."""

    lengths: TokenLengths
    place = EditPlace.TOKENS
    is_needed_in_stages = True

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        lengths = self.lengths
        # The outermost forward decides for those inside of it
        if lengths.forwards == 0:
            edits = edits_of(module)
            lengths.length = None
            lengths.records = torch.is_grad_enabled() and not (edits is not None and edits.whole_tokens)
        lengths.forwards += 1

    def end(self, module: nn.Module, output: Any) -> None:
        lengths, edits = self.lengths, edits_of(module)
        # An exception in an earlier hook ends a forward that has not been counted
        lengths.forwards = max(0, lengths.forwards - 1)
        for _, result in tensors(output) if edits is not None and edits.whole_tokens else ():
            if result.requires_grad:
                result.register_hook(self.begin_backward)

    def begin_backward(self, _: Tensor) -> None:
        """A recomputation in this backward must not shard tokens, either."""
        self.lengths.whole = _backward()


@dataclass
class KeptLength(Edit):
    """Keeps the number of tokens of a sharded argument, for a recomputation of the module in backward."""

    path: LeafPath
    lengths: TokenLengths
    place = EditPlace.LENGTHS

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path_in_call = argument_path(module, args, kwargs, self.path)
        x = None if path_in_call is None else leaf_at((args, kwargs), path_in_call)
        # A call may have another kind of argument in its place
        if not isinstance(x, Tensor):
            return
        if self.lengths.forwards == 0:
            self.lengths.recall(x)
        elif not torch.compiler.is_compiling():
            self.lengths.remember(x)
