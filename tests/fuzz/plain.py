"""tp_ext's names in plain torch: what the fuzzer's models are built of when no line of the library must take part.

Same constructors, calls and state-dict keys; the weights are whole, and what only cuts (``group``, ``parts``, ..) is
taken and passed over. No dropout: its masks are the library's own.
"""

from torch import nn

from tests.helpers import registry
from tp_ext import Part, RotaryEmbedding, RouterConfig  # values, without computation

__all__ = ["Part", "RotaryEmbedding", "RouterConfig"]
globals().update(registry.PLAIN)


def scatter_to_region(x, group, dim=-1, sizes=None):
    return x


gather_from_region = scatter_to_region


def all_to_all_region(x, group, split_dim, concat_dim, split_sizes=None, concat_sizes=None):
    return x


def clip_grad_norm_(module_or_parameters, max_norm, norm_type, *, group, foreach):
    params = module_or_parameters.parameters() if isinstance(module_or_parameters, nn.Module) else module_or_parameters
    return nn.utils.clip_grad_norm_(params, max_norm, norm_type)


def coalesce_gradients(module):
    pass
