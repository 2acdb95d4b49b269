"""Models of transformers whose ranks have shares of their own: values, generated tokens, files and adapters are those
of one process."""

from typing import Any

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.one_plan import run
from tests.helpers.ranks import run_raises
from tests.huggingface.test_load_save import _folder, _generates, _round_trip
from tp_ext import huggingface


def _in_shares(group: Any, call: Any, shares: list[float], *args: Any) -> Any:
    with tp_ext.shares(shares):
        return call(group, *args)


@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_logits_and_files_are_those_of_one_process(name, tmp_path):
    path = _folder(tmp_path / "model", name)
    assert len(set(ranks.run(_in_shares, 2, _round_trip, [1, 3], name, path))) == 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_generate_gives_the_tokens_of_one_process(sequence_parallel, tmp_path):
    run(_in_shares, 2, _generates, [2, 1], _folder(tmp_path), sequence_parallel)


def _adapters(group: Any, path: Any) -> None:
    models = [huggingface.from_pretrained(path, group=group, shares=shares) for shares in ([2, 1], [1, 3])]
    assert [model.tp_ext_plan.shares for model in models] == [(2, 1), (1, 3)]
    tp_ext.add_lora(models[0], targets=["up_proj", "down_proj"], r=2, alpha=4)
    for name, parameter in models[0].named_parameters():
        if "lora_B" in name:
            layout = dict(tp_ext.layouts(models[0])).get(name)
            full = torch.randn(112 if "up_proj" in name else 64, 2, generator=torch.Generator().manual_seed(len(name)))
            parameter.data.copy_(layout.shard(full) if layout else full)
    huggingface.save_adapter(models[0], path / "adapter")
    huggingface.load_adapter(models[1], path / "adapter")
    ids = torch.arange(4, 14).view(2, 5)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in models]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_an_adapter_of_other_shares_is_loaded(tmp_path):
    run(_adapters, 2, _folder(tmp_path))


def _load(group: Any, path: Any, shares: Any) -> None:
    huggingface.from_pretrained(path, group=group, shares=shares)


def test_shares_of_other_ranks_are_refused(tmp_path):
    run_raises(_load, 2, ValueError, "shares: .* are 3 weights", _folder(tmp_path), [1, 1, 2], in_turns=False)
