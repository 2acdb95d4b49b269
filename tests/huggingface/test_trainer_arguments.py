"""Arguments of the constructor of transformers' Trainer that ours refuses."""

import pytest
import torch

from tp_ext import huggingface


def test_models_are_made_before():
    for options in ({"model_init": lambda: None}, {}):
        with pytest.raises(ValueError, match="model_init: models must be made and sharded before; pass model=, and"):
            huggingface.Trainer(**options)
    with pytest.raises(ValueError, match="model_init: models must be made"):
        huggingface.Trainer(torch.nn.Linear(1, 1), None, None, None, None, None, lambda: None)
    with pytest.raises(NotImplementedError, match="hyperparameter_search: models must be made and sharded before"):
        huggingface.Trainer.hyperparameter_search(object.__new__(huggingface.Trainer))
