"""One step of a causal model over static caches, which are inputs of its graph: prompts and decoding are one call."""

import copy
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.nn.attention.kv_cache import TokenCache
from tp_ext.nn.embedding import VocabParallelEmbedding, VocabParallelLMHead


class DecodingStep(nn.Module):
    """Logits of the last of the next n tokens: ``[batch, vocab]``, or this rank's columns of them.

    Its inputs are the ids ``[batch, n]``, the number of tokens before them, 0-d, and the caches, which it writes.

    Args:
        model: of our layers, ``forward(ids, caches=)``, or of transformers.
        ids: of a prompt, ``[batch, n]``.
        max_seq: the length of the caches.

    Raises:
        ValueError: it is neither, or its caches are not of keys and values alone.
    """

    vocab_size: int

    def __init__(self, model: nn.Module, ids: Tensor, max_seq: int) -> None:
        super().__init__()
        self.model, self.batch, self.max_seq = model, ids.shape[0], max_seq
        parameters = inspect.signature(model.forward).parameters
        self.of_layers = "caches" in parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        if self.of_layers:
            self.templates: Sequence[TokenCache] = _layer_caches(model, self.batch, max_seq)
            buffers = [
                (f"caches.{i}.{name}", getattr(c, name)) for i, c in enumerate(self.templates) for name in c.contents
            ]
            self.vocab_size = _vocabulary(model)
        elif "past_key_values" in parameters and hasattr(model, "config"):
            buffers = _transformers_caches(model, ids, max_seq)
            config: Any = model.config
            self.vocab_size = config.get_text_config().vocab_size
        else:
            raise ValueError(
                f"generate: {type(model).__name__} must be a model of our layers with forward(ids, caches=), or a "
                "causal model of transformers"
            )
        self.names = ["ids", "position", *(name for name, _ in buffers)]
        self.tensors = [ids, torch.zeros((), dtype=torch.int64), *(tensor for _, tensor in buffers)]
        self.output_names = ["logits"]

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ids, position, *buffers = tensors
        logits = (
            self._over_layers(ids, position, buffers)
            if self.of_layers
            else self._of_transformers(ids, position, buffers)
        )
        return (logits.reshape(self.batch, -1, logits.shape[-1])[:, -1],)

    def uncached(self, ids: Tensor) -> Tensor:
        """Returns the logits after all ids by the model's call without caches."""
        logits = self.model(ids) if self.of_layers else self.model(input_ids=ids, use_cache=False).logits
        return logits.reshape(self.batch, -1, logits.shape[-1])[:, -1]

    def _over_layers(self, ids: Tensor, position: Tensor, buffers: list[Tensor]) -> Tensor:
        remaining = iter(buffers)
        caches = []
        for template in self.templates:
            cache = copy.copy(template)
            inputs = {name: next(remaining) for name in template.contents}
            # Each cache counts its tokens in place, and the input keeps its value
            cache._buffers = {**template._buffers, **inputs, "position": position.clone()}
            caches.append(cache)
        logits: Tensor = self.model(ids, caches=caches)
        return logits

    def _of_transformers(self, ids: Tensor, position: Tensor, buffers: list[Tensor]) -> Tensor:
        module: Any = sys.modules["transformers.cache_utils"]
        layers = []
        for keys, values in zip(buffers[::2], buffers[1::2], strict=True):
            layer = module.StaticLayer(max_cache_len=self.max_seq)
            layer.keys, layer.values, layer.cumulative_length = keys, values, position.clone()
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            layers.append(layer)
        places = (position + torch.arange(ids.shape[1]))[None].expand(self.batch, -1)
        logits: Tensor = self.model(
            input_ids=ids,
            position_ids=places,
            past_key_values=module.Cache(layers=layers),
            use_cache=True,
            **self.options,
        ).logits
        return logits


def _layer_caches(model: nn.Module, batch: int, max_seq: int) -> list[TokenCache]:
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "new_cache")]
    if not layers:
        raise ValueError("generate: the model has no attention layer with a cache")
    return [layer.new_cache(batch, max_seq, static=True) for layer in layers]


def _vocabulary(model: nn.Module) -> int:
    of_layers = [m for m in model.modules() if isinstance(m, VocabParallelLMHead | VocabParallelEmbedding)]
    sizes = {layer.vocab_size for layer in of_layers}
    if len(sizes) != 1:
        raise ValueError(
            f"generate: the embeddings and heads of the model have {sorted(sizes)} ids, and must have one vocabulary"
        )
    return sizes.pop()


def _transformers_caches(model: nn.Module, ids: Tensor, max_seq: int) -> list[tuple[str, Tensor]]:
    """Returns names and buffers of the keys and values of each layer, whose heads a run shows."""
    module: Any = sys.modules["transformers.cache_utils"]
    cache = module.DynamicCache()
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    buffers = []
    for i, layer in enumerate(cache.layers):
        if type(layer) is not module.DynamicLayer:
            raise ValueError(f"generate: layer {i} keeps a {type(layer).__name__}, which cannot be exported")
        for name, filled in (("k", layer.keys), ("v", layer.values)):
            batch, heads, _, width = filled.shape
            buffers.append((f"caches.{i}.{name}", filled.new_zeros(batch, heads, max_seq, width)))
    return buffers
