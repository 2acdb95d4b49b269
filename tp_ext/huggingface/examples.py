"""Arguments of a model's forward with which a plan is made."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

BATCH = 3  # no factor of a dim of usual models; so are the numbers of tokens
TOKENS = (5, 7, 11, 13, 17, 19, 23, 29, 37, 67, 131, 257, 521)
LABELS_OF_TOKENS = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification",
)  # fmt: skip
LABELS_OF_ROWS = ("ForSequenceClassification", "ForImageClassification")


def example_of(model: transformers.PreTrainedModel, tokens: int = 1) -> dict[str, Any]:
    """Returns a batch of tokens or images, with labels where the class has a loss; at least ``tokens`` tokens a row.

    Raises:
        ValueError: the model's main input is neither.
    """
    kind, names = type(model).__name__, set(inspect.signature(model.forward).parameters)
    text = model.config.get_text_config()
    example: dict[str, Any] = {}
    tokens = next((n for n in TOKENS if n >= tokens), tokens)
    if model.main_input_name == "input_ids":
        count = getattr(text, "vocab_size", 2)
        example["input_ids"] = torch.arange(1, BATCH * tokens + 1).view(BATCH, tokens) % count
        if "labels" in names and kind.endswith(LABELS_OF_TOKENS):
            size = getattr(model.config, "num_labels", 2) if kind.endswith("ForTokenClassification") else count
            example["labels"] = example["input_ids"] % size
    elif model.main_input_name == "pixel_values":
        height, width = _image_size(model.config)
        example["pixel_values"] = torch.zeros(BATCH, getattr(model.config, "num_channels", 3), height, width)
    else:
        raise ValueError(f"example: must be given for {kind}, whose main input is {model.main_input_name!r}")
    if "labels" in names and kind.endswith(LABELS_OF_ROWS):
        example["labels"] = torch.arange(BATCH) % model.config.num_labels
    if "use_cache" in names:
        example["use_cache"] = False
    return example


def _image_size(config: transformers.PreTrainedConfig) -> tuple[int, int]:
    size = getattr(config, "image_size", 224)
    return (size, size) if isinstance(size, int) else (size[0], size[1])
