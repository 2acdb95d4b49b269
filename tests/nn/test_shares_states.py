"""States of models with shares are loaded with any other shares, at any number of ranks, bit by bit; and models with
shares in what works on models: norms, clipping, checks, pickles."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tp_ext
from tp_ext.debug import simulate

SHARES = [[2, 1], [0, 1], [0.1, 0.2, 0.7], [3, 0, 1], [1, 0, 0, 2], None]
PAIRS = [  # by default all shares are saved and loaded, from fewer ranks on more and from more on fewer
    pytest.param(SHARES[a], SHARES[b], marks=[] if (b - a) % len(SHARES) in (1, 4) else pytest.mark.exhaustive)
    for a in range(len(SHARES))
    for b in range(len(SHARES))
    if a != b
]


def _model(group, shares, seed):
    torch.manual_seed(seed)
    options = {"group": group, "dtype": torch.float64}
    with tp_ext.shares(shares if group is None or shares is None or len(shares) == group.size() else None):
        model = nn.ModuleDict()
        model["embedding"] = tp_ext.VocabParallelEmbedding(5, 8, **options)
        model["attention"] = tp_ext.ParallelAttention(8, 6, num_kv_heads=3, head_dim=2, qk_norm=True, **options)
        model["mlp"] = tp_ext.ParallelMLP(8, 7, activation="swiglu", **options)
        model["head"] = tp_ext.VocabParallelLMHead(8, 5, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _loss(model, ids):
    h = model["attention"](model["embedding"](ids))
    return model["head"].loss(model["mlp"](h), ids)


def _trained(group, shares):
    model, optimizer = _model(group, shares, 0)
    _loss(model, torch.arange(10).view(2, 5) % 5).backward()
    optimizer.step()
    return model, optimizer


def _whole(model, optimizer):
    state = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)
    of_optimizer = {f"{name}.{key}": value for name, of in state[1]["state"].items() for key, value in of.items()}
    return {**state[0], **of_optimizer}


def _save(rank, group, shares, path):
    model, optimizer = _trained(group, shares)
    tp_ext.save_checkpoint(path / "directory", model, optimizer)
    tp_ext.save_safetensors(path / "model.safetensors", model)
    dcp.save(tp_ext.sharded_state_dict(model, optimizer), checkpoint_id=path / "dcp")
    return _whole(model, optimizer)


def _load(rank, group, shares, path, full):
    expected = copy.deepcopy(full)
    for kind in ("directory", "dcp", "safetensors", "full"):
        model, optimizer = _model(group, shares, 1)
        if kind == "directory":
            tp_ext.load_checkpoint(path / kind, model, optimizer)
        elif kind == "dcp":
            tp_ext.load_sharded_state_dict(model, optimizer, storage_reader=dcp.FileSystemReader(path / kind))
        elif kind == "safetensors":
            tp_ext.load_safetensors(path / "model.safetensors", model)
        else:
            names = [name for name, _ in model.named_parameters()]
            tp_ext.load_full_state_dict(model, {name: expected[name] for name in names})
        state = _whole(model, optimizer) if kind in ("directory", "dcp") else tp_ext.full_state_dict(model)
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), (kind, name)
        if kind in ("directory", "dcp"):
            assert state.keys() == expected.keys()


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_states_have_no_shares(saved, loaded, tmp_path):
    ranks = [3 if shares is None else len(shares) for shares in (saved, loaded)]
    full = simulate(_save, ranks[0], saved, tmp_path)[0]
    simulate(_load, ranks[1], loaded, tmp_path, full)
    if loaded is not None:
        _load(0, None, None, tmp_path, full)


def _refit(rank, group, source, target):
    ranks = [torch.distributed.new_group(list(range(len(shares)))) for shares in (source, target)]
    models = [
        _model(of, shares, seed)[0] if rank < len(shares) else None
        for of, shares, seed in zip(ranks, (source, target), (0, 1), strict=True)
    ]
    tp_ext.refit.plan(*models, process_group=group).run()
    full = dict(_model(None, None, 0)[0].named_parameters())
    for name, param in models[1].named_parameters() if models[1] is not None else ():
        assert torch.equal(param, param.tp_layout.shard(full[name])), name


@pytest.mark.parametrize(("source", "target"), [([2, 1], [1, 0, 3]), ([0, 2, 1], [1, 5]), ([3, 1], [1, 3])])
def test_refit_between_shares(source, target):
    simulate(_refit, max(len(source), len(target)), source, target)


def _work(rank, group, shares):
    ids = torch.arange(10).view(2, 5) % 5
    model, optimizer = _model(group, shares, 0)
    _loss(model, ids).backward()
    norm = tp_ext.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    tp_ext.debug.check(model)
    copied = copy.deepcopy(model)
    assert torch.equal(_loss(copied, ids), _loss(model, ids))
    if group is not None:
        assert copied["mlp"].shares == tuple(shares) and f"shares={tuple(shares)}" in repr(copied)
        assert "shares=" in repr(dict(tp_ext.shardings(model)))
    return norm, _loss(model, ids)


@pytest.mark.parametrize("shares", SHARES[:-1])
def test_norms_and_checks_of_models_with_shares(shares):
    expected = _work(0, None, None)
    for norm, loss in simulate(_work, len(shares), shares):
        assert torch.allclose(norm, expected[0], rtol=1e-12, atol=0)
        assert torch.allclose(loss, expected[1], rtol=1e-12, atol=0)
