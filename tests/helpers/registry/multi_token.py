"""Multi-token prediction. It needs an embedding and a head, so it is no case of the registry."""

import torch
from torch import nn

import tp_ext

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


class OneDepth(tp_ext.MultiTokenPrediction):
    """A module of one depth, without a block, as a function of the hidden state."""

    def __init__(self, vocab, hidden, group):
        embedding = tp_ext.VocabParallelEmbedding(vocab, hidden, group=group)
        head = tp_ext.VocabParallelLMHead(hidden, vocab, group=group)
        super().__init__(hidden, nn.Identity(), embedding=embedding, head=head, group=group)
        self.vocab = vocab

    def forward(self, x):
        return super().forward(x, torch.arange(len(x))[:, None] % self.vocab)[0]
