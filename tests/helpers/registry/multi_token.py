"""Multi-token prediction. It needs an embedding and a head, so it is no case."""

import torch
from torch import nn

import tp_ext
from tests.helpers.registry.bytes import A2A, AG, AR, RS, SP, E, H, N, S, Saved, Sent, V
from tests.helpers.registry.entries import HIDDEN
from tests.helpers.registry.rules import VOCAB, Subject, module

ERRORS = [
    ("next_tokens(ids, 0, fill=0)", ValueError, "depth: 0 must be an integer of at least 1"),
    ("next_tokens(ids, 1, fill=0.5)", TypeError, "fill: 0.5 must be an integer"),
    ("next_tokens([1], 1, fill=0)", TypeError, "tokens: list must be a tensor"),
    ("next_tokens(ones(()), 1, fill=0)", ValueError, "tokens: a 0-d tensor must have"),
    ("next_tokens(ids, 1, layout=3, fill=0)", TypeError, "layout: int must be a ContextLayout, or None"),
    (
        "next_tokens(ids, 1, layout=ContextLayout([3], group=None), fill=0)",
        ValueError,
        "tokens: 4 must be the 3 tokens of all sequences of the layout",
    ),
    (
        "MultiTokenPrediction(8, nn.Identity(), embedding=3, head=3, group=g)",
        TypeError,
        "embedding: int must be a VocabParallelEmbedding",
    ),
]


def _one_depth(vocab, hidden, **options):
    """A module of one depth, without a block."""
    embedding = tp_ext.VocabParallelEmbedding(vocab, hidden, **options)
    head = tp_ext.VocabParallelLMHead(hidden, vocab, **options)
    return tp_ext.MultiTokenPrediction(hidden, nn.Identity(), embedding=embedding, head=head, **options)


class _OfHidden(nn.Module):
    """A module of one depth as a function of the hidden state."""

    def __init__(self, group):
        super().__init__()
        self.predict = _one_depth(VOCAB, HIDDEN, group=group)

    def forward(self, x):
        return self.predict(x, torch.arange(len(x))[:, None] % VOCAB)[0]


def _call(model, x):
    return model(x, torch.arange(N)[:, None] % V)[0]


def _sent(**options):
    def make(g):
        model = _one_depth(V, H, group=g, **options)
        x = torch.randn(N // g.size() if options else N, H, requires_grad=True)
        return lambda: _call(model, x)

    return make


SUBJECTS = {"MultiTokenPrediction": Subject(module(_OfHidden))}
SENT = {
    "multi-token prediction": Sent("MultiTokenPrediction", _sent(), [(AR, S)] * 2, [(AG, N * 2 * H * E)]),
    "multi-token prediction sp": Sent(
        "MultiTokenPrediction",
        _sent(**SP),
        lambda p: [*[(RS, S)] * 2, (A2A, N // p * 2 * H * E)],
        lambda p: [*[(AG, S)] * 2, (A2A, N // p * 2 * H * E), *[(AR, H * E)] * 3],
    ),
}
SAVED = {
    "multi-token prediction": Saved(
        "MultiTokenPrediction",
        lambda **o: _one_depth(V, H, **o),
        lambda z: z.n_sp * (3 * z.h * z.e + 12) + z.n * 2 * z.h // z.p * z.e + 8 * z.n,
        call=_call,
    )
}
