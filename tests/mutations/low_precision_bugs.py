"""Bugs of one line in weights of few bits."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext")
_csrc = mutation_in("csrc")
MEANS = "low_precision/test_compress.py::test_means_and_residuals_by_the_formula"
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
    _bug(
        "low_bits_shared_experts",
        "nn/mlp.py",
        " and layers[name].low_bits is None for",
        " for",
        "Shared experts whose weights are quantised are computed from weights that are gone.",
        "low_precision/test_quantize.py::test_shared_experts",
    ),
    _bug(
        "low_bits_latent_cache",
        "nn/attention/latent_attention.py",
        " and layer.low_bits is None and not hooked",
        " and not hooked",
        "Latent attention with a cache reads a weight that is gone.",
        "low_precision/test_quantize.py::test_latent_attention_with_a_cache",
    ),
    _csrc(
        "compressed_scale_of_nan",
        "kernels/compressed_blocks.h",
        "return size <= std::numeric_limits<float>::max() ? size : std::numeric_limits<float>::infinity();",
        "return size;",
        "A NaN in a block is dropped by the maximum.",
        "kernels/test_compressed_blocks.py::test_a_block_that_is_not_finite_is_nan_and_loses_nothing",
    ),
    _csrc(
        "compressed_product_fused",
        "kernels/compressed_blocks.h",
        "return value == value ? value : std::numeric_limits<float>::quiet_NaN();",
        "return value;",
        "The error is that of a product that was not rounded.",
        "kernels/test_compressed_blocks.py::test_values_and_errors_by_the_formula",
    ),
    _csrc(
        "compressed_subnormal_codes",
        "kernels/compressed_blocks.h",
        "magnitude < 0x3c800000u ? subnormal : normal",
        "magnitude < 0x3c000000u ? subnormal : normal",
        "e4m3 codes between 2^-7 and 2^-6 are those of normal numbers.",
        "kernels/test_compressed_blocks.py::test_values_and_errors_by_the_formula",
    ),
    _bug(
        "compressed_owners_of_buckets",
        "low_precision/compressed_exchange.py",
        "length = lengths[(rank - number) % ranks]",
        "length = lengths[rank]",
        "The first ranks own the longer shares of all parameters.",
        "low_precision/test_compress.py::test_bytes_on_the_wire",
    ),
    _bug(
        "compressed_residual_of_the_owner",
        "low_precision/compress.py",
        "total[first : first + count] += param.share_error",
        "pass",
        "The residual leaves out what the owner's sum has lost.",
        f"{MEANS}[2-int8]",
    ),
    _bug(
        "compressed_missing_gradient",
        "low_precision/compress.py",
        "param.grad = torch.zeros_like(param)",
        "continue",
        "A rank without a gradient leaves the parameter out.",
        f"{MEANS}[3-int8]",
    ),
    _bug(
        "compressed_state_shared",
        "low_precision/compress.py",
        "param.error = errors[name].clone()",
        "param.error = errors[name]",
        "Residuals that were loaded share memory with the state.",
        "low_precision/test_compress.py::test_a_resumed_run_has_the_same_bits",
    ),
    _bug(
        "compressed_ddp_order",
        "low_precision/compress.py",
        "if bucket.is_last():",
        "if False:",
        "The last buckets of DDP are never completed.",
        "low_precision/test_compress.py::test_ddp_gives_the_same_means_in_any_buckets[2-False]",
    ),
]
