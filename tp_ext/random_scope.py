"""Masks by name: the seed of a mask is a function of (seed, step, microbatch, name of the module, number of the call),
and the row of a token is that in the global batch. So a mask does not depend on any other draw, on any rank.

:func:`at` seeds torch's default generators with a number that stands for the step and the microbatch. Whatever saves
and restores the state of a generator, as activation checkpointing does, thereby restores the step and the microbatch,
also while another microbatch is current. A draw of the generator, the ticket, distinguishes calls from recomputations.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_int
from tp_ext.context_layout import ContextLayout

# [Note: a step and a microbatch are a seed of torch's generators]
_MARK = 0x5E9D << 47  # upper bits that mark the seed of a scope
_STEPS = 2  # the calls of this many steps are remembered, for recomputation

CallNumbers = dict[int, dict[int, int]]
"""Key of a module's name -> ticket -> number of the call."""


def number_of(*values: object) -> int:
    """Returns a hash of 62 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little") >> 2


class _Base:
    """The arguments of the last :func:`tp_ext.manual_seed`, and this rank's places on the mesh.

    Attributes:
        seed: of the job; None before the first call.
        position: of this rank along the data axes of the mesh.
        pipeline: of this rank along the axis ``pp``.
        stage: of a pipeline, whose forward runs; the draws of modules without a name differ by it.
        context_size: ranks along the axis ``cp``.
        rows_in_use: whether a layout has ever been given to :func:`at`. Compiled code depends on it: rows are then a
            table. It stays, so that code does not change between a step and its backward.
    """

    seed: int | None = None
    position: int = 0
    pipeline: int = 0
    stage: int = 0
    context_size: int = 1
    rows_in_use: bool = False


base = _Base()


def base_seed(caller: str) -> int:
    """Returns the seed of the job. Raises RuntimeError: there is none."""
    if base.seed is None:
        raise RuntimeError(f"{caller}: tp_ext.manual_seed(seed) must have been called before, on every rank")
    return base.seed


class MaskScope:
    """A step and a microbatch, and where the latter is in the global batch: see :func:`at`."""

    def __init__(
        self,
        step: int,
        microbatch: int,
        batch_offset: int | None,
        seq: int | None,
        token_offset: int | None,
        layout: ContextLayout | None,
    ) -> None:
        seed = base_seed("tp_ext.random.at")
        self.step = (seed, step)
        self.arguments = step, microbatch, batch_offset, seq, token_offset, layout
        self.batch_offset, self.seq, self.token_offset, self.layout = self.arguments[2:]
        # With its place in the batch a token has one mask, whichever microbatch it is in, on whichever replica
        self._mask = (*self.step,) if batch_offset is not None else (*self.step, base.position, microbatch)
        self._context_size = base.context_size
        cut = None if layout is None else (layout.lengths, layout.batch, layout.group.size, layout.balance)
        base_fields = base.position, base.pipeline, base.stage, base.context_size
        place = (*self.step, *base_fields, microbatch, batch_offset, seq, token_offset, cut)
        self.generator_seed = _MARK | number_of("generator", place) & ((1 << 47) - 1)
        self._calls: CallNumbers = {}  # since the scope was entered last
        self._before: CallNumbers = {}  # before that; looked up in backward alone
        self._rows: dict[torch.device, Tensor] = {}

    def enter(self) -> None:
        """Numbers calls from 0 again."""
        for key, calls in self._calls.items():
            self._before.setdefault(key, {}).update(calls)
        self._calls = {}

    def mask_seed(self, key: int, device: torch.device) -> int:
        """Draws a ticket and returns the seed of the mask of this call of the module."""
        ticket = _draw_ticket(device)
        calls = self._calls.setdefault(key, {})
        call = calls.get(ticket)
        if torch._C._current_graph_task_id() != -1:  # recomputation
            before = self._before.get(key, {}).get(ticket)
            if call is not None and before is not None and call != before:
                raise RuntimeError(
                    "tp_ext.random.at: a mask cannot be recomputed, since the same step and microbatch were entered "
                    "twice with calls in another order; the backward must come before the second entry"
                )
            call = before if call is None else call
        if call is None:
            call = calls[ticket] = len(calls)
        return number_of("mask", self._mask, key, call)

    def first_row(self, x: Tensor, full: int, tokens: bool) -> int:
        """Returns the number, in the global batch, of the first of ``full`` slices of dim 0 of x, of which this rank
        may hold some: a sequence, or (``tokens``) a token.

        Raises:
            ValueError: it does not follow from what :func:`at` was given.
        """
        if self.layout is None and self._context_size > 1:
            raise ValueError(f"layout: must be given to tp_ext.random.at on a mesh with cp = {self._context_size}")
        if self.batch_offset is None:
            return 0
        if not tokens and x.dim() > 2:
            return self.batch_offset
        if self.token_offset is not None:
            return self.token_offset
        shape = list(x.shape)
        if self.seq is None:
            raise ValueError(
                f"seq: must be given to tp_ext.random.at with batch_offset = {self.batch_offset}: dim 0 of activations "
                f"of shape {shape} counts tokens"
            )
        if full % self.seq:
            raise ValueError(f"seq: {self.seq} must divide the {full} tokens of activations, here of shape {shape}")
        return self.batch_offset * self.seq

    def first_token(self) -> int:
        """Returns the number, in the global batch, of the first token of packed sequences.

        Raises:
            ValueError: it does not follow from what :func:`at` was given.
        """
        if self.batch_offset is None:
            return 0
        if self.token_offset is None and self.seq is None:
            raise ValueError(
                f"token_offset: must be given to tp_ext.random.at with batch_offset = {self.batch_offset} and packed "
                "sequences"
            )
        return self.batch_offset * (self.seq or 0) if self.token_offset is None else self.token_offset

    def rows(self, device: torch.device, full: int) -> Tensor:
        """Returns the number, in the global batch, of each of the ``full`` tokens of this rank of a context group."""
        layout = self.layout
        assert layout is not None
        _, p, rank = layout.group
        if full != layout.sizes[rank]:
            raise ValueError(f"layout: its {layout.sizes[rank]} tokens on rank {rank} of {p} must be the {full} of x")
        if device not in self._rows:
            order, sizes = layout.order(False, torch.device("cpu"))
            own_rows = order[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
            first = 0
            if self.batch_offset is not None:
                seq = layout.lengths[0] if layout.batch else 0
                first = self.batch_offset * seq if self.token_offset is None else self.token_offset
            self._rows[device] = (own_rows + first).to(device)
        return self._rows[device]


_scopes: dict[int, MaskScope] = {}  # by the seed of the generators
_recent: list[tuple[int, int]] = []  # (seed, step) of the scopes in the table


def current_scope(device: torch.device) -> MaskScope | None:
    """Returns the scope for which torch's default generator of the CPU is seeded, whatever the device of activations:
    traced code for CUDA may recompute under a generator of its own, which :func:`at` has not seeded.

    Raises:
        RuntimeError: it is one of a step before the last one.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    seed = torch.default_generator.initial_seed()
    scope = _scopes.get(seed)
    if scope is None and seed >> 47 == _MARK >> 47:
        raise RuntimeError(
            f"tp_ext.random.at: a mask is recomputed after {_STEPS} more steps were entered, or in another process; "
            "the backward of a step must come before"
        )
    return scope


def is_entered() -> bool:
    """Returns whether masks are drawn by name, so that generators may differ."""
    return torch.default_generator.initial_seed() in _scopes


def take_over_seed(seed: int | None) -> int | None:
    """Takes over another rank's seed of the job. In a scope, which then has that seed, returns the seed of its
    generators."""
    entered = _scopes.get(torch.default_generator.initial_seed())
    if seed is not None and seed != base.seed:
        base.seed = seed
        if entered is not None:
            entered = MaskScope(*entered.arguments)
            _recent.append(entered.step)
            _scopes[entered.generator_seed] = entered
    return None if entered is None else entered.generator_seed


def _draw_ticket(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tp_ext.random.at: masks by name must not be captured in a CUDA graph, which would replay one mask; "
            "capture outside of it"
        )
    return int(torch.randint(0, 1 << 62, (), dtype=torch.int64, device="cpu"))


class Entered:
    """The result of :func:`at`: a context manager that restores the generators as they were before the call."""

    def __init__(self, scope: MaskScope) -> None:
        self._cpu = torch.default_generator.get_state()
        self._cuda = [g.get_state() for g in _cuda_generators()]
        if scope.step in _recent:
            _recent.remove(scope.step)
        _recent.append(scope.step)
        for step in _recent[:-_STEPS]:
            for seed in [seed for seed, old in _scopes.items() if old.step == step]:
                del _scopes[seed]
        del _recent[:-_STEPS]
        scope = _scopes.setdefault(scope.generator_seed, scope)
        scope.enter()
        torch.default_generator.manual_seed(scope.generator_seed)
        _seed_cuda(scope.generator_seed)

    def __enter__(self) -> "Entered":
        return self

    def __exit__(self, *error: Any) -> None:
        torch.default_generator.set_state(self._cpu)
        if self._cuda:
            for generator, state in zip(_cuda_generators(), self._cuda, strict=True):
                generator.set_state(state)
        else:  # CUDA was not in use at the entry, and may be now
            _seed_cuda(torch.default_generator.initial_seed())


def _cuda_generators() -> tuple[torch.Generator, ...]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def _seed_cuda(seed: int) -> None:
    if torch.cuda.is_initialized():
        for generator in _cuda_generators():
            generator.manual_seed(seed)
    elif torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)  # when it will be in use


@torch.compiler.disable
def at(
    step: int,
    microbatch: int = 0,
    *,
    batch_offset: int | None = None,
    seq: int | None = None,
    token_offset: int | None = None,
    layout: ContextLayout | None = None,
) -> Entered:
    """Seeds torch's generators for a microbatch of a step; modules that have names then draw their masks by name.

    The mask of a module named by :func:`tp_ext.name_modules` is a function of the seed of :func:`tp_ext.manual_seed`,
    the step, the microbatch, the module's name, the number of the call in this microbatch, and the index in the full
    tensor. It does not depend on p, on the order of microbatches, modules or stages, on recomputation, or on
    ``torch.compile``. With ``batch_offset`` the index is that in the global batch, in place of the microbatch: the mask
    of token t of sequence b is one thing for all numbers of replicas, microbatches and ranks of a context group.

    A context manager, at whose end the generators are as before; or a plain call, which holds until the next one or
    :func:`tp_ext.manual_seed`::

        for step in range(steps):
            for i, (ids, target) in enumerate(microbatches):
                with tp_ext.random.at(step, i, batch_offset=first_sequence + i * len(ids), seq=ids.shape[1]):
                    loss = model(ids, target)
                loss.backward()  # recomputes each microbatch with its own masks

    Entering the same step and microbatch again repeats their masks, of named modules call by call.

    Modules without a name, ``tp_ext.dropout``, sampling and torch's own draws follow the order of draws from generators
    that are the same for the same arguments, but for the position of this rank along the data axes and the pipeline; so
    do the masks of ``exact_dropout=False``. Along ``cp`` they are alike. ``torch.manual_seed`` in between ends the
    drawing by name until the next call. Under torch 2.11, two calls of one module with the same input in one compiled
    graph share a mask. Activations ``[batch, hidden]`` count as tokens: with ``batch_offset`` give a
    pooled activation a dim of length 1.

    Args:
        step: of the training. Masks of it and of the step entered before can be recomputed.
        microbatch: its index in the step.
        batch_offset: the index, in the global batch of the step, of this microbatch's first sequence. Without it masks
            differ by microbatch and along the data axes of the mesh that was given to ``manual_seed``.
        seq: tokens of a sequence, needed with ``batch_offset`` where dim 0 of activations counts tokens, as in
            ``[tokens, hidden]`` and under sequence parallelism; not in ``[batch, seq, hidden]``.
        token_offset: the index of the first token in the global batch, default ``batch_offset * seq``; for packed
            sequences of unequal length, whose masks depend on the indices of their tokens alone.
        layout: how the tokens are cut over the ranks of a context group, if they are.

    Communicates nothing.

    Raises:
        ValueError: a number is negative, or given without ``batch_offset``; ``layout`` is of packed sequences and
            ``batch_offset`` is given without ``token_offset``; where a mask is drawn, ``seq`` or ``layout`` is missing
            or does not fit the activations. TypeError: an argument of another type. RuntimeError: no
            ``tp_ext.manual_seed``; where a mask is drawn, a CUDA graph is captured, or the step is too old.
    """
    # With batch_offset masks are drawn for the global batch, where seq and token_offset count; without it these mean
    # nothing
    numbers: dict[str, Any] = {"step": step, "microbatch": microbatch, "batch_offset": batch_offset}
    for name, value in (numbers | {"seq": seq, "token_offset": token_offset}).items():
        if value is None and name not in ("step", "microbatch"):
            continue
        check_int(**{name: value})
        if value < (name == "seq"):
            raise ValueError(f"{name}: {value} must not be {'less than 1' if name == 'seq' else 'negative'}")
        if name in ("seq", "token_offset") and batch_offset is None:
            raise ValueError(f"{name}: {value} must be given together with batch_offset")
    if layout is not None and not isinstance(layout, ContextLayout):
        raise TypeError(f"layout: {layout!r} must be a ContextLayout, or None")
    if layout is not None and layout.batch is None and batch_offset is not None and token_offset is None:
        raise ValueError(f"token_offset: must be given with batch_offset = {batch_offset} and packed sequences")
    scope = MaskScope(step, microbatch, batch_offset, seq, token_offset, layout)
    base.rows_in_use = base.rows_in_use or layout is not None
    return Entered(scope)


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def draws_by_name(module: Any, device: torch.device) -> bool:
    """Returns whether the module draws its masks by :func:`rows_seed` or :func:`sequence_seeds`. Traced code always
    does if the module has a name: outside of :func:`at` these draw from the generators as ever."""
    if module._name_key is None:
        return False
    return _traced() or current_scope(device) is not None


def rows_are_listed() -> bool:
    """Returns whether the masks of activations are drawn by a table of the rows of tokens."""
    return base.rows_in_use


# [Note: seeds of named masks come with rows]
def rows_seed(module: Any, x: Tensor, each: int, start: int, full: int, tokens: bool) -> Tensor:
    """Draws the seed of a mask of activations x, and the numbers of its rows in the global batch.

    Args:
        each: rows, as the kernel cuts x, in a slice of dim 0 of x; those of tokens if :func:`rows_are_listed`.
        start, full: x is the slices from ``start`` on of ``full`` along dim 0.
        tokens: dim 0 counts tokens; otherwise sequences, or tokens.

    Returns:
        ``[2]``: the seed, the first row; if rows are listed the seed and the row of each token.
    """
    table = rows_are_listed()
    if _traced():
        drawn = _ops.draw_rows_seed(_traced_name(module), x.detach(), each, start, full, tokens, table)
        return drawn.to(x.device, non_blocking=True)
    return _draw_rows_seed(module._name_number, x, each, start, full, tokens, table, x.device)


def sequence_seeds(module: Any, like: Tensor, starts: Sequence[int], unit: int) -> Tensor:
    """Draws the seeds of the masks of attention weights.

    Args:
        starts: the first token of each packed sequence, which has its own seed, if ``unit`` is 0; otherwise ``[0]``.
        unit: rows, as the kernel cuts the weights, of a sequence of a batch; the batch has one seed.

    Returns:
        ``[sequences, 2]``: the seed, the first row.
    """
    if _traced():
        drawn = _ops.draw_sequence_seeds(_traced_name(module), like.detach(), starts, unit)
        return drawn.to(like.device, non_blocking=True)
    return _draw_sequence_seeds(module._name_number, like, starts, unit, like.device)


def _traced_name(module: Any) -> Tensor:
    """Returns the name as a tensor: an input of compiled code; a constant in other traces, fake under fake tensors."""
    if torch.compiler.is_compiling():
        key: Tensor = module._name_key
        return key
    return torch.tensor(module._name_number, device="cpu")


def _draw_as_ever(device: torch.device, count: int = 1) -> Tensor:
    drawn = [torch.randint(0, 1 << 62, (), dtype=torch.int64, device=device) for _ in range(count)]
    return torch.stack(drawn) if drawn else torch.empty(0, dtype=torch.int64, device=device)


def _pair(seed: int, row: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.tensor([seed, row], dtype=torch.int64, device="cpu")
    pair = torch.full((2,), seed, dtype=torch.int64, device=device)  # kernels; a copy would wait for the device
    pair[1].fill_(row)
    return pair


def _draw_rows_seed(
    number: int, x: Tensor, each: int, start: int, full: int, tokens: bool, table: bool, device: torch.device
) -> Tensor:
    scope = current_scope(x.device)
    count = _ops.table_rows(x, tokens) if table else 1
    if scope is not None and scope.layout is not None:
        rows = scope.rows(device, full * each).narrow(0, start * each, count)
        return torch.cat([_pair(scope.mask_seed(number, device), 0, device)[:1], rows])
    first = start if scope is None else start + scope.first_row(x, full, tokens)
    if scope is not None and not table:
        return _pair(scope.mask_seed(number, device), first * each, device)
    seed = _draw_as_ever(device) if scope is None else _pair(scope.mask_seed(number, device), 0, device)[:1]
    return torch.cat([seed, torch.arange(first * each, first * each + count, device=device)])


def _draw_sequence_seeds(number: int, like: Tensor, starts: Sequence[int], unit: int, device: torch.device) -> Tensor:
    scope = current_scope(like.device)
    if scope is None:
        seeds = _draw_as_ever(device, len(starts))
        return torch.stack([seeds, torch.zeros_like(seeds)], 1)
    seed = scope.mask_seed(number, device)
    if unit:
        return _pair(seed, (scope.batch_offset or 0) * unit, device)[None]
    # By its first token, so that nothing depends on how many sequences other microbatches have
    first = scope.first_token()
    pairs = [_pair(number_of(seed, first + start), 0, device) for start in starts]
    return torch.stack(pairs) if pairs else torch.empty(0, 2, dtype=torch.int64, device=device)


def draw_rows_seed_of_name(
    name: Tensor, x: Tensor, each: int, start: int, full: int, tokens: bool, table: bool
) -> Tensor:
    """Implements the operator :func:`_ops.draw_rows_seed`."""
    return _draw_rows_seed(int(name), x, each, start, full, tokens, table, name.device)


def draw_sequence_seeds_of_name(name: Tensor, like: Tensor, starts: Sequence[int], unit: int) -> Tensor:
    """Implements the operator :func:`_ops.draw_sequence_seeds`."""
    return _draw_sequence_seeds(int(name), like, starts, unit, name.device)
