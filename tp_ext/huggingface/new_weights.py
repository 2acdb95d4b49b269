"""Weights that no file has: computed or drawn whole, as transformers does, alike on all ranks; and memory for all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor, nn


def generator_states(device: torch.device) -> list[Tensor]:
    """Returns the states of the generators from which weights on a device are drawn."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def drawing_from(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """Draws from generators in the given states. A rank whose own are in other states gets these back; one whose own
    are the same goes on behind the draws, as one process does."""
    states_before = generator_states(device)
    _set(states, device)
    try:
        yield
    finally:
        if not all(torch.equal(state, other) for state, other in zip(states_before, states, strict=True)):
            _set(states_before, device)


def compute(
    model: transformers.PreTrainedModel, missing: set[str], device: torch.device, states: list[Tensor]
) -> dict[str, Tensor]:
    """Computes, on a device, the buffers that are not persistent and the tensors ``missing``, by the model's own
    ``_init_weights``.

    Returns:
        The values of missing parameters, which stay on meta in the model; buffers are put into it.
    """
    # No file has buffers that are not persistent; tied weights are those that they are tied to
    computed = (missing | {name for name, _ in model.named_non_persistent_buffers()}) - set(model.all_tied_weights_keys)
    whole: dict[str, Tensor] = {}
    on_meta: list[tuple[nn.Module, str, nn.Parameter]] = []
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        if name not in computed:
            # initialize_weights draws for all others; this one comes from a file
            tensor._is_hf_initialized = True
            continue
        owner, _, attribute = name.rpartition(".")
        module, real = model.get_submodule(owner), torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            on_meta.append((module, attribute, tensor))
            module._parameters[attribute] = drawn = nn.Parameter(real, requires_grad=tensor.requires_grad)
            drawn.__dict__.update(tensor.__dict__)
            whole[name] = real
        else:
            module._buffers[attribute] = real
    with torch.device(device), drawing_from(states, device):
        model.initialize_weights()
    for module, attribute, parameter in on_meta:
        # On meta again: the plan shards the parameter, of which only shards get memory. Models tag what they draw
        parameter.__dict__.update(vars(module._parameters[attribute]))
        module._parameters[attribute] = parameter
    return whole


def allocate(model: nn.Module, device: torch.device, later: Collection[int] = ()) -> None:
    """Gives memory to parameters and buffers on meta but those with the ids ``later``; tied ones stay one."""
    real_by_id: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in real_by_id:
            new = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                new.__dict__.update(tensor.__dict__)
            real_by_id[id(tensor)] = new
        return real_by_id[id(tensor)]

    modules = list(model.modules())  # their tensors live until the end, so that ids are unique
    kept = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta and id(tensor) not in later:
                    tensors[name] = real(tensor)  # type: ignore[assignment]
    del kept
