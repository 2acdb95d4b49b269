"""A mixture of experts in plain torch, one process: a loop over the experts, written from the formulas of
``RouterConfig`` and ``ParallelMoE``. The oracle of the expert layer's tests."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.oracle import ACTIVATIONS


class DenseMoE(nn.Module):
    """Its parameters are those of an unsharded ``tp_ext.ParallelMoE``; ``state``: that layer's full state dict."""

    def __init__(self, state, *, top_k, activation, config, capacity=None, drop_order="token"):
        super().__init__()
        self.names = list(state)
        for name, value in state.items():
            at = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    at.register_module(part, nn.Module())
                at = getattr(at, part)
            at.register_parameter(last, nn.Parameter(value.clone(), requires_grad=value.dtype != torch.float32))
        self.top_k, self.activation, self.config = top_k, activation, config
        self.capacity, self.drop_order = capacity, drop_order

    def get(self, name):
        return self.get_parameter(name) if name in self.names else None

    def gradients(self):
        return {name: self.get(name).grad for name in self.names if self.get(name).requires_grad}

    def choose(self, scores):
        """The experts of one token, by Python's sort, which is stable."""
        c, bias = self.config, self.get("router.e_score_correction_bias")
        choice = (scores + (0 if bias is None else bias.double())).tolist()
        per_group = len(choice) // c.num_groups
        groups = [choice[g * per_group : (g + 1) * per_group] for g in range(c.num_groups)]
        best = sorted(range(c.num_groups), key=lambda g: -sum(sorted(groups[g])[-2:]))[: c.top_groups]
        allowed = [e for e in range(len(choice)) if e // per_group in best]
        return sorted(allowed, key=lambda e: -choice[e])[: self.top_k]

    def forward(self, x, sequences=1):
        """x ``[tokens, hidden]`` -> y, the loss, and the slots (token, expert) that are kept."""
        c, weight = self.config, self.get("router.weight")
        n, tokens = weight.shape[0], x.shape[0]
        logits = x @ weight.T
        scores = logits.softmax(-1) if c.scores == "softmax" else logits.sigmoid()
        chosen = [self.choose(one) for one in scores.detach()]
        weights = []
        for t, experts in enumerate(chosen):
            w = scores[t, experts]
            weights.append((w / w.sum() if c.normalize else w) * c.scaling)
        slots = [(t, e, weights[t][j]) for t, experts in enumerate(chosen) for j, e in enumerate(experts)]
        kept = []
        for e in range(n):
            own = [slot for slot in slots if slot[1] == e]
            if self.capacity is not None:
                if self.drop_order == "weight":
                    own.sort(key=lambda slot: -slot[2].item())
                own = own[: math.ceil(self.capacity * self.top_k * tokens / n)]
            kept += own
        y = x * 0
        for t, e, w in kept:
            y = y.index_add(0, torch.tensor([t]), (w * self.ffn("experts", x[t], e))[None])
        if self.get("shared.up.weight") is not None:
            y = y + self.ffn("shared", x)
        return y, self.loss(logits, scores, chosen, sequences), sorted((t, e) for t, e, _ in kept)

    def ffn(self, kind, x, e=None):
        def linear(x, name):
            if kind == "shared":
                return F.linear(x, self.get(f"shared.{name}.weight"), self.get(f"shared.{name}.bias"))
            bias = self.get(f"experts.{name}_bias")
            return F.linear(x, self.get(f"experts.{name}_weight")[e], None if bias is None else bias[e])

        return linear(ACTIVATIONS[self.activation](linear(x, "up")), "down")

    def loss(self, logits, scores, chosen, sequences):
        c, n, tokens = self.config, logits.shape[1], logits.shape[0]
        if tokens == 0:
            return scores.sum()
        share = scores / scores.sum(-1, keepdim=True)
        length = tokens // sequences
        spans = [range(tokens)]
        if c.balance_over == "sequence":
            spans = [range(s * length, (s + 1) * length) for s in range(sequences)]
        balances = []
        for span in spans:
            balance = 0
            for e in range(n):
                f = sum(chosen[t].count(e) for t in span) / (len(span) * self.top_k)
                balance = balance + n * f * share[span.start : span.stop, e].mean()
            balances.append(balance)
        z = logits.logsumexp(-1).square().mean()
        return c.balance_loss * sum(balances) / len(balances) + c.z_loss * z
