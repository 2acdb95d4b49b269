"""Bugs of one line in multi-token prediction."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext")
PLAIN = "nn/test_multi_token.py::test_losses_and_gradients_are_those_of_plain_torch"
AXES = "nn/test_multi_token.py::test_training_over_all_axes_is_that_of_plain_torch"

MULTI_TOKEN_BUGS = [
    _bug(
        "multi_token_across_sequences",
        "nn/multi_token.py",
        "inside = place < end[:, None]",
        "inside = place < flat.numel()",
        "The last token of a packed sequence predicts the first ones of the next sequence.",
        PLAIN,
    ),
    _bug(
        "multi_token_embedding_not_shared",
        "nn/multi_token.py",
        "copy.deepcopy(layer, {id(param): param for param in layer.parameters()})",
        "copy.deepcopy(layer)",
        "Embedding and head are copies, which nothing keeps equal to the model's.",
        PLAIN,
    ),
    _bug(
        "multi_token_not_divided_by_depth",
        "nn/multi_token.py",
        "(self.loss_weight / self.depth)",
        "self.loss_weight",
        "The losses of the depths are summed instead of averaged.",
        PLAIN,
    ),
    _bug(
        "multi_token_from_the_model_alone",
        "nn/multi_token.py",
        'hidden = module["block"](module["projection"](pair, total), **keywords)\n            results.append('
        'module["norm"](hidden))',
        'results.append(module["norm"](module["block"](module["projection"](pair, total), **keywords)))',
        "Each depth starts from the hidden state of the model instead of that of the depth before.",
        PLAIN,
    ),
    _bug(
        "multi_token_normalised_twice",
        "nn/multi_token.py",
        'results.append(module["norm"](hidden))',
        'hidden = module["norm"](hidden)\n            results.append(hidden)',
        "The next depth gets the normalised hidden state.",
        PLAIN,
    ),
    _bug(
        "multi_token_same_ids",
        "nn/multi_token.py",
        "ids = next_ids[..., k].flatten()",
        "ids = next_ids[..., 0].flatten()",
        "All depths look up the next token.",
        PLAIN,
    ),
    _bug(
        "multi_token_one_denominator",
        "parallel/step_loss.py",
        "self.total = self._data.sum(torch.stack(counts).sum(0)).clamp(min=1)",
        "self.total = self._data.sum(torch.stack(counts).sum(0)).clamp(min=1)\n"
        "            self.total = self.total[:1].expand_as(self.total) if self.total.dim() else self.total",
        "All losses are divided by the number of labels of the next token.",
        AXES,
    ),
    _bug(
        "multi_token_local_denominators",
        "parallel/step_loss.py",
        "scaled = value * (self._ranks / self.total).to(value.dtype)",
        "scaled = value * ((1 if self.total.dim() else self._ranks) / self.total).to(value.dtype)",
        "Losses with several denominators are not scaled by the number of ranks that are averaged.",
        AXES,
    ),
]
