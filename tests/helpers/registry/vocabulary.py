"""Embedding, head and loss."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import tp_ext
from tests.helpers.registry import rules
from tests.helpers.registry.bytes import AG, AR, RS, SP, E, H, N, S, Saved, Sent, V, called
from tests.helpers.registry.entries import HIDDEN, VOCAB, Case
from tests.helpers.registry.rules import TOKENS, Subject, key

CASES = {
    "embedding": Case(
        "VocabParallelEmbedding", (VOCAB, HIDDEN), takes="ids", call={}, keeps_dtype=True, collectives=(1, 1)
    ),
    "head": Case("VocabParallelLMHead", (HIDDEN, VOCAB), {"bias": True}, gives="features", collectives=(1, 1)),
}


ERRORS = [
    ("Embedding(1, 4, group=g)", ValueError, "vocab_size: 1 must be at least the number of ranks, p = 2"),
    ("Embedding(0, 4, group=g)", ValueError, "num_embeddings: 0 must be"),
    ("Embedding(8, -4, group=g)", ValueError, "embedding_dim: -4 must be"),
    ("Embedding(8, 4, group=g, pad_to_multiple_of=0)", ValueError, "pad_to_multiple_of: 0 must be"),
    ("Embedding(8, 4, group=g)(ones(3))", TypeError, "ids: dtype Float must be int64 or int32"),
    ("Embedding(8, 4, group=g)(ids + 5)", IndexError, r"ids: 8 must be in .*8"),
    ("Embedding(8, 4, group=g)(ids - 1)", IndexError, "ids: -1 must be in"),
    ("LMHead(4, 1, group=g)", ValueError, "vocab_size: 1 must be at least .* p = 2"),
    ("LMHead(0, 8, group=g)", ValueError, "hidden_size: 0 must be"),
    ("LMHead(4, 8, group=g)(ones(3, 5))", ValueError, r"x: shape \[3, 5\] must end in the 4"),
    ("LMHead(4, 8, group=g, **sp)(ones(3, 4), total_tokens=9)", ValueError, "total_tokens: 9 gives"),
    ("loss(g, ones(()))", ValueError, "logits_local: a 0-d tensor must have"),
    ("loss(g, ones(4, 4).long())", TypeError, "logits: dtype Long must be a floating"),
    ("loss(g, target=ids.int())", TypeError, "target: dtype Int must be int64"),
    ("loss(g, target=ids[:3])", ValueError, r"target: shape \[3\] must be that of logits, \[4, 4\]"),
    ("loss(g, target=ids + 6, vocab_size=8)", IndexError, r"target: 8 must be in .*8"),
    ("loss(g, target=ids - 1)", IndexError, "target: -1 must be in"),
    ("loss(g, reduction='average')", ValueError, "reduction: 'average' must be one of"),
    ("loss(g, gradient_reduction='average')", ValueError, "gradient_reduction: 'average' must be one of"),
    ("loss(g, mean_over=g, reduction='sum')", ValueError, "mean_over: must not be given with reduction='sum'"),
    ("loss(g, mean_over=init_device_mesh('cpu', (1, 2), mesh_dim_names=('a', 'b')))", ValueError, "mesh: its axes"),
    ("loss(g, label_smoothing=1.5)", ValueError, r"label_smoothing: 1.5 must be in \[0, 1\]"),
    ("loss(g, label_smoothing=float('nan'))", ValueError, "label_smoothing: nan must be in"),
    ("loss(g, z_loss=-1.0)", ValueError, "z_loss: -1 must be at least 0"),
    ("loss(g, vocab_size=4)", ValueError, r"logits_local: 4 columns.*vocab_size = 4.*gathered"),
    ("loss(g, vocab_size=12)", ValueError, "logits_local: 4 columns .*vocab_size = 12 at p = 2"),
    ("loss(g, vocab_size=1)", ValueError, "vocab_size: 1 must be at least the number of ranks, p = 2"),
    ("linear_cross_entropy(ones(4, 4), ones(4, 4), ids, g, vocab_size=4)", ValueError, "weight: 4 rows.*gathered"),
    ("linear_cross_entropy(ones(4, 4), ones(4, 4), ids, g, chunk_tokens=0)", ValueError, "chunk_tokens: 0 must be"),
    ("Embedding(8, 4, padding_idx=8, group=g)", ValueError, r"padding_idx: 8 must be in \[-8, 8\), or None"),
    ("Embedding.from_embedding(nn.Linear(8, 4), group=g)", TypeError, "embedding: Linear must be an nn.Embedding"),
    (
        "Embedding.from_embedding(nn.Embedding(8, 4, max_norm=1.0), group=g)",
        ValueError,
        "embedding.max_norm: 1.0 must be None",
    ),
    (
        "Embedding.from_embedding(nn.Embedding(8, 4, sparse=True), group=g)",
        ValueError,
        "embedding.sparse: True must be False",
    ),
    ("LMHead.from_linear(nn.Embedding(8, 4), group=g)", TypeError, "linear: Embedding must be an nn.Linear"),
    ("LMHead(4, 8, group=g).loss(ones(4, 4), ids, reduction='max')", ValueError, "reduction: 'max'"),
    ("LMHead(4, 8, group=g).sample(ones(4, 4), top_k=0)", ValueError, "top_k: 0 must be"),
    ("loss(g, vocab_size=8.0)", ValueError, "vocab_size: 8.0 must be an integer"),
    ("CrossEntropy(group=g, reduction='max')(ones(4, 4), ids)", ValueError, "reduction: 'max'"),
]


def _embedding(group):
    """The embedding as a function of its weight; of a weight that holds each row twice, a lookup of twice the ids."""
    module = tp_ext.VocabParallelEmbedding(rules.VOCAB, HIDDEN, group=group)
    rows = len(module.weight)

    def f(weight):
        ids = torch.tensor([1, 5, 0] * (len(weight) // rows))
        return functional_call(module, {"weight": weight[:rows]}, (ids,))

    return f


def _loss(by_module):
    def make(group):
        target = torch.arange(2 * TOKENS) % HIDDEN
        module, at = tp_ext.VocabParallelCrossEntropy(group=group, vocab_size=HIDDEN), key(group)
        if by_module:
            return lambda x: module(x, target[: len(x)])
        return lambda x: tp_ext.vocab_parallel_cross_entropy(x, target[: len(x)], at, vocab_size=HIDDEN)

    return make


def _linear_loss(group):
    at, (_, p, rank) = key(group), tp_ext.ParallelModule(group).tp_group
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rules.VOCAB, HIDDEN, generator=generator).tensor_split(p)[rank]
    target = torch.arange(2 * TOKENS) % rules.VOCAB
    return lambda x: tp_ext.linear_cross_entropy(x, weight.to(x), target[: len(x)], at, vocab_size=rules.VOCAB)


def _token(name):
    def make(group):
        at = key(group)

        def f(x):
            torch.manual_seed(6)
            return getattr(tp_ext, name)(x, at, vocab_size=HIDDEN)

        return f

    return make


SUBJECTS = {
    "VocabParallelEmbedding": Subject(_embedding, (rules.VOCAB, HIDDEN), x_dim=0),
    "VocabParallelCrossEntropy": Subject(_loss(True), x_dim=-1),
    "vocab_parallel_cross_entropy": Subject(_loss(False), x_dim=-1),
    "linear_cross_entropy": Subject(_linear_loss),
    "vocab_parallel_argmax": Subject(_token("vocab_parallel_argmax"), x_dim=-1),
    "vocab_parallel_sample": Subject(_token("vocab_parallel_sample"), x_dim=-1),
}


def _of_ids(**options):
    def make(g):
        module = tp_ext.VocabParallelEmbedding(V, H, group=g, **options)
        return lambda: module(torch.arange(N))

    return make


def _of_logits(name, forward, *args, **options):
    """A function or, by its module, a loss of this rank's logits."""

    def make(g):
        function, logits = getattr(tp_ext, name), torch.randn(N, V // g.size(), requires_grad=True)
        if isinstance(function, type):
            return lambda: function(group=g, **options)(logits, *args)
        return lambda: function(logits, *args, group=g, **options)

    return Sent(name, make, forward)


_IDS = torch.arange(N)
_EMBEDDING, _HEAD = "VocabParallelEmbedding", "VocabParallelLMHead"
SENT = {
    "embedding": Sent(_EMBEDDING, _of_ids(), [(AR, S)]),
    "embedding sp": Sent(_EMBEDDING, _of_ids(**SP), [(RS, S)], [(AG, S)]),
    "head": Sent(_HEAD, called(tp_ext.VocabParallelLMHead, H, V), [], [(AR, S)]),
    "head sp": Sent(_HEAD, called(tp_ext.VocabParallelLMHead, H, V, own=True, **SP), [(AG, S)], [(AG, S), (RS, S)]),
    "loss": _of_logits("vocab_parallel_cross_entropy", lambda p: [(AG, p * (N + 1) * 4 * E)], _IDS),
    "loss smoothed": _of_logits(
        "VocabParallelCrossEntropy", lambda p: [(AG, p * (N + 1) * 4 * E)], _IDS, label_smoothing=0.1, z_loss=0.1
    ),
    "argmax": _of_logits("vocab_parallel_argmax", lambda p: [(AG, p * (N + 1) * 2 * 8)]),
    "sample": _of_logits("vocab_parallel_sample", lambda p: [(AG, p * (N + 1) * 2 * 8)]),
    "sample top_k": _of_logits(
        "vocab_parallel_sample", lambda p: [(AG, p * (N + 1) * 2 * 8), (AG, p * N * (3 + 1) * E)], top_k=3
    ),
    "sample top_p": _of_logits(
        "vocab_parallel_sample",
        lambda p: [(AG, p * (N + 1) * 2 * 8), (AG, p * 2 * 8), (AG, N * V * E)],
        top_p=0.9,
    ),
}
SAVED = {
    "head": Saved(_HEAD, lambda **o: tp_ext.VocabParallelLMHead(H, V, **o), lambda z: z.n_sp * z.h * z.e),
    "embedding": Saved(_EMBEDDING, lambda **o: tp_ext.VocabParallelEmbedding(V, H, **o), lambda z: 8 * z.n, "ids"),
    "loss": Saved(  # logits, targets, two numbers a row
        "VocabParallelCrossEntropy",
        lambda group, **_: tp_ext.VocabParallelCrossEntropy(group=group),
        lambda z: z.n * V // z.p * z.e + 16 * z.n,
        "logits",
        lambda module, logits: module(logits, _IDS),
    ),
}


class VocabParallelEmbedding(nn.Embedding):
    def __init__(self, vocab, hidden, *, sequence_parallel=False, dtype=None, device=None, **_cut):
        super().__init__(vocab, hidden, dtype=dtype, device=device)
        self.flat = sequence_parallel

    def forward(self, ids):
        return super().forward(ids.flatten() if self.flat else ids)


class VocabParallelLMHead(nn.Linear):
    def __init__(self, hidden, vocab, *, bias=False, dtype=None, device=None, **_cut):
        super().__init__(hidden, vocab, bias, dtype=dtype, device=device)

    def forward(self, x, total_tokens=None):
        return super().forward(x)

    def loss(self, x, target, total_tokens=None, chunk_tokens=None, **options):
        return vocab_parallel_cross_entropy(self(x), target, None, vocab_size=None, inplace_backward=False, **options)


def vocab_parallel_cross_entropy(
    logits, target, group, *, vocab_size, ignore_index, label_smoothing, z_loss, reduction, inplace_backward
):
    rows, ids = logits.flatten(0, -2), target.flatten()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    kept = ids != ignore_index
    losses = functional.cross_entropy(rows, ids, **options) + z_loss * rows.logsumexp(-1).square() * kept
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / (kept.sum().clamp(min=1) if reduction == "mean" else 1)


PLAIN = {
    "VocabParallelEmbedding": VocabParallelEmbedding,
    "VocabParallelLMHead": VocabParallelLMHead,
    "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy,
}


def draw_vocabulary(r, p):
    return {"vocab": r.randint(max(p, 2), 17), "pad": r.choice((None, None, 1, 2, 4))}


def draw_loss(r, head, p, own):
    options = {
        "tell_vocab": not (head["pad"] is None and head["vocab"] % p == 0 and r.random() < 0.5),
        "ignore_index": r.choice((-100, 1)),
        "label_smoothing": r.choice((0.0, 0.1, 0.9)),
        "z_loss": r.choice((0.0, 0.05)),
        "reduction": r.choice(("mean", "sum", "none")),
        "inplace_backward": r.random() < 0.3,
    }
    # By head.loss, which keeps no logits that backward could overwrite, and knows its vocabulary
    without_logits = own.random() < 0.5 and options["tell_vocab"] and not options["inplace_backward"]
    return options | {"by_head": {"chunk_tokens": own.choice((None, 1, 2, 5))} if without_logits else None}


OFF = {
    "tied": False, "pad": None, "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "sum",
    "inplace_backward": False, "tell_vocab": True, "by_head": None, "chunk_tokens": None,
}  # fmt: skip
