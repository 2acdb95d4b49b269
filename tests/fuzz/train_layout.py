"""The fuzzer's training over all axes of a mesh, by ``tp_ext.parallelize``, and the same training in one process, which
sees the global batch in one call of the model.

Where the bound comes from: compare.py.
"""

import contextlib
import random

import torch
from torch import nn

import tp_ext
from tests.fuzz.compare import KIND, OWN
from tests.fuzz.layouts import AXES
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tests.helpers.models import GPT, Block


def gpt(options, mesh=None, sp=False, context="ring", wide=False):
    """The model of a configuration; wide: its activations are [batch, seq, hidden]."""
    tp, cp, ep, dp = (None if mesh is None else mesh[name] for name in ("tp", "cp", "ep", "dp"))
    norm, parallel = getattr(tp_ext, options["norm"]), {"group": tp, "sequence_parallel": sp}
    same = ("head_dim", "bias", "qk_norm", "causal", "sliding_window")
    attention = {name: options[name] for name in same} | {
        "num_heads": options["heads"],
        "num_kv_heads": options["kv_heads"],
        "rope": 100.0 if options["rope"] else None,
        "dropout": options["attention_dropout"],
        "context_group": cp,
        "context": context,
    }
    mlp = {"ffn_hidden_size": options["ffn"], "activation": options["activation"], "bias": options["bias"]}
    if options["experts"]:
        losses = {name: options[name] for name in ("balance_loss", "z_loss")}
        mlp |= {name: options[name] for name in ("top_k", "shared_experts", "capacity")}
        mlp |= {"num_experts": options["experts"], "expert_group": ep, "data_groups": dp, "context_group": cp}
        mlp["router"] = tp_ext.RouterConfig(balance_over="sequence", **losses)

    def block():
        return Block(options["hidden"], attention, mlp, norm=norm, dropout=options["dropout"], **parallel)

    sizes = options["vocab"], options["hidden"], block, options["blocks"]
    model = GPT(*sizes, norm=norm, tied=options["tied"], flat=not wide, **parallel)
    if options["frozen"]:
        model.blocks[0].mlp.requires_grad_(False)
        model.norm.requires_grad_(False)
    return model


def row(config, step, number):
    """Row ``number`` of the global batch of a step: ids, target, and the lengths of its documents."""
    r, batch, vocab = random.Random(f"{config['seed']} {step} {number}"), config["batch"], config["model"]["vocab"]
    ids, target = ([r.randrange(vocab) for _ in range(batch["seq"])] for _ in range(2))
    ends = sorted(r.randint(0, batch["seq"]) for _ in range(r.randint(0, 3)))
    for token in range(batch["seq"]) if batch["ignored"] == "many" else ():
        if (number % 3 == 1 or r.random() < 0.5) and (number, token) != (0, 0):  # some rows have no valid token
            target[token] = -100
    if batch["ignored"] == "few" and number % 2:
        target[r.randrange(batch["seq"])] = -100
    lengths = [end - begin for begin, end in zip([0, *ends], [*ends, batch["seq"]], strict=True)]
    return torch.tensor(ids), torch.tensor(target), lengths


def batch_of(config, step, data_rank, context):
    """Inputs, target and keyword arguments of ``run.step`` for a rank."""
    batch, layout = config["batch"], config["layout"]
    own = batch["rows"] // (layout["dp"] * layout["ep"])
    rows = [row(config, step, own * data_rank + i) for i in range(own)]
    each = own // layout["microbatches"]
    if batch["packed"]:
        layouts = [tp_ext.ContextLayout(lengths, group=context) for _, _, lengths in rows]
    else:
        layouts = [tp_ext.ContextLayout(batch=each, seq=batch["seq"], group=context)]
    cut = zip(layouts if batch["packed"] else layouts * own, rows, strict=True)
    pairs = [(one.shard(ids), one.shard(target)) for one, (ids, target, _) in cut]
    ids, target = (torch.stack(both) for both in zip(*pairs, strict=True))
    if layout["layout"]:
        keywords = {"layout": layouts if batch["packed"] else layouts[0]}
    else:
        keywords = {} if layout["how"] == "wide" else {"batch_size": each}
    if layout["sp"]:
        keywords["total_tokens"] = layouts[0].sizes[layouts[0].group.rank]
    if layout["how"] == "flat":
        ids, target = ids.flatten(), target.flatten()
    return ids, target, keywords


def loss_of(config, group, reduction):
    def loss(logits, target):
        return tp_ext.vocab_parallel_cross_entropy(
            logits.flatten(0, -2), target.flatten(), group, vocab_size=config["model"]["vocab"], reduction=reduction
        )

    return loss


OPTIMIZER = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}  # eps: see compare.py


def train(group, config):
    """Losses and norms of all steps, and on rank 0 the full parameters."""
    layout = config["layout"]
    with default_dtype(torch.float64):
        mesh = mesh_of(*(layout[axis] for axis in AXES), names=AXES)
        if not layout["meta"]:
            tp_ext.manual_seed(config["seed"])
        with torch.device("meta") if layout["meta"] else contextlib.nullcontext():
            wide = layout["how"] == "wide"
            model = gpt(config["model"], mesh, layout["sp"], layout["context"], wide)
        if not layout["meta"]:
            tp_ext.reset_parameters(model)
        cuts = [cut for name, cut in tp_ext.shardings(model) if cut is not None and ".experts." not in name]
        # Data parallelism adds gradients in an order that depends on the place of an element among all of them: where
        # shards are uneven, what several ranks of tp hold has the same bits only if two are added
        even = all(len({cut.local_size(rank, layout["tp"]) for rank in range(layout["tp"])}) == 1 for cut in cuts)
        names = ("schedule", "microbatches", "reduction", "zero", "offload", "recompute")
        options = {name: layout[name] for name in names}
        loss = loss_of(config, mesh["tp"], layout["reduction"])
        run = tp_ext.parallelize(model, mesh, loss=loss, seed=config["seed"], **options)
        # foreach: DTensor looks for the sharding of one operator for all shapes
        optimizer = run.optimizer(torch.optim.AdamW, **OPTIMIZER, foreach=layout["zero"] > 1)
        found = []
        for step in range(config["steps"]):
            inputs, target, keywords = batch_of(config, step, run.data_rank, mesh["cp"])
            found.append(run.step(inputs, target, **keywords))
            if (step + 1) % config["accumulate"] == 0:
                found.append(run.clip_grad_norm_(config["clip"]))
                optimizer.step()
                optimizer.zero_grad()
        if layout["dp"] * layout["ep"] * layout["cp"] < 3 or even:
            tp_ext.debug.check(run.state, mesh=mesh)
        state = tp_ext.full_state_dict(run.state, mesh=mesh)
        return torch.stack(found), dict(state) if group.rank() == 0 else None


def one_process(group, config):
    """The same of one process, without a layout."""
    with default_dtype(torch.float64):
        tp_ext.manual_seed(config["seed"])
        model = gpt(config["model"])
        tp_ext.reset_parameters(model)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
        found, batch, loss_fn = [], config["batch"], loss_of(config, None, "mean")
        for step in range(config["steps"]):
            ids, target, lengths = zip(*(row(config, step, i) for i in range(batch["rows"])), strict=True)
            if batch["packed"]:
                ends = torch.tensor([0, *(n for one in lengths for n in one)]).cumsum(0).tolist()
                where, place = {"cu_seqlens": ends}, {"token_offset": 0}
            else:
                where, place = {"batch_size": batch["rows"]}, {"seq": batch["seq"]}
            with tp_ext.random.at(step, batch_offset=0, **place):
                loss = loss_fn(model(torch.cat(ids), **where), torch.cat(target))
            (loss + tp_ext.router_loss(model)).backward()
            found.append(loss.detach())
            if (step + 1) % config["accumulate"] == 0:
                found.append(nn.utils.clip_grad_norm_(model.parameters(), config["clip"]))
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(found), dict(model.state_dict())


def compare(per_rank, reference):
    """Returns the differences as text, the largest error relative to its bound, and its name."""
    (want, want_state), wrong, worst = reference, [], (0.0, "")
    state = per_rank[0][1]
    if state.keys() != want_state.keys():
        return [f"on one side only: {sorted(state.keys() ^ want_state.keys())}"], (float("inf"), "")
    largest = max(1.0, *(float(value.abs().amax()) for value in want_state.values()))
    pairs = [
        (f"number {i} of losses and norms, on rank {rank}", a, b)
        for rank, (found, _) in enumerate(per_rank)
        for i, (a, b) in enumerate(zip(found, want, strict=True))
    ]
    pairs += [(f"parameter {name}", state[name], want_state[name]) for name in want_state]
    for name, value, goal in pairs:
        if value.shape != goal.shape:
            wrong.append(f"{name}: shape {tuple(value.shape)}, in one process {tuple(goal.shape)}")
            continue
        bound = OWN * float(goal.abs().amax()) + KIND * largest
        error = float((value - goal).abs().amax())
        worst = max(worst, (error / bound, name))
        if not error <= bound:  # also of NaN
            wrong.append(f"{name}: off by {error:.3g}, in one process {float(goal.abs().amax()):.3g} at most")
    return wrong, worst
