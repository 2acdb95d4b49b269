"""Bugs of one line in weights of few bits."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext")
LAYERS = "low_precision/test_quantize.py::test_random_layers"

LOW_PRECISION_BUGS = [
    _bug(
        "low_bits_scale_of_a_shard",
        "nn/low_bits.py",
        "return shared if self.bits == 8 else []",
        "return []",
        "The scale of a row of int8 is that of the inputs that a rank holds.",
        f"{LAYERS}[2]",
    ),
    _bug(
        "low_bits_high_before_low",
        "nn/low_bits.py",
        "return low | high << 4, scale",
        "return high | low << 4, scale",
        "int4 packs the second input of a pair into the low bits.",
        f"{LAYERS}[1]",
    ),
    _bug(
        "low_bits_rounded_twice",
        "nn/low_bits.py",
        "yield rows, self.dequantized(packed[rows], scale[rows])",
        "yield rows, self.dequantized(packed[rows], scale[rows]).bfloat16().float()",
        "Products take a weight that is rounded to bf16.",
        f"{LAYERS}[1]",
    ),
    _bug(
        "low_bits_adapters_quantised",
        "low_precision/quantize.py",
        "and id(module) not in adapters",
        "",
        "The factors of an adapter are quantised, too.",
        "low_precision/test_quantize.py::test_adapters_train_above[adapters first-int8]",
    ),
    _bug(
        "low_bits_rank_that_fails_alone",
        "huggingface/quantised.py",
        "if error is not None and self._meetings:",
        "if False:",
        "A rank that cannot read a weight leaves the others waiting at the next layer.",
        "huggingface/test_quantised.py::test_weights_that_are_not_finite",
    ),
    _bug(
        "low_bits_tied_head",
        "low_precision/quantize.py",
        'and owners.get(id(module._parameters.get("weight")), 1) == 1',
        "",
        "A head whose weight is that of an embedding is quantised, and no longer tied.",
        "low_precision/test_quantize.py::test_memory_copies_and_filters",
    ),
]
