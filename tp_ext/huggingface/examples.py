"""Arguments of a model's forward with which a plan is made."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

BATCH, TOKENS = 3, 5  # no factor of a dim of usual models
LABELS_OF_TOKENS = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification",
)  # fmt: skip
LABELS_OF_ROWS = ("ForSequenceClassification", "ForImageClassification")


def example_of(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """Returns a batch of tokens or images, with labels where the class has a loss.

    Raises:
        ValueError: the model's main input is neither.
    """
    kind, names = type(model).__name__, set(inspect.signature(model.forward).parameters)
    text = model.config.get_text_config()
    example: dict[str, Any] = {}
    if model.main_input_name == "input_ids":
        count = getattr(text, "vocab_size", 2)
        example["input_ids"] = torch.arange(1, BATCH * TOKENS + 1).view(BATCH, TOKENS) % count
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
