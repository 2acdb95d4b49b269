"""Traps that have a plan which shards nearly all and is right: it must be found, whole is not enough."""

FULLY = set(
    """
    BatchStatistics Cached Closure Collected ComplexRotary Connections Counter Excitation ForwardOfParts
    InNamedTuple Indexed Interleaved LinearAttention MaskedVocabulary MomentumTeacher MovingAverage NormalizedHeads
    OneHot OwnBatchNorm Patches Recomputed RelativePositions ReturnsMaps ReturnsWeight Shared
    StackedExperts StochasticDepth Teacher TokensAsNumber TrapClassWeights TrapFeatureHook TrapFocalLoss
    TrapGradientClamped TrapInputGradient TrapInputGradientOfBlock TrapLazyRope TrapPairs TrapReturnsHidden
    TrapStoresActivations Twice batch_norm_of_sums between_batch_into_features between_constant_of_hidden
    between_glu_of_sum between_normalized_sum between_softmax_in_pairs between_swiglu_chunk between_tokens_mixed
    between_tokens_shifted between_zero_times_length clamped_before draws_feature_dropout draws_fork_rng
    draws_multinomial draws_python_random draws_row_mask function_added_on_hidden function_meanoverwidth_on_input
    function_projected_on_input function_reversed_on_hidden function_reversed_on_input function_rolled_on_input
    function_signed_on_hidden function_thresholded_on_hidden hidden_in_features hidden_maxout_across
    hidden_maxout_within hidden_out_features hidden_strided_slices hook_forward_on_row hook_forward_with_kwargs
    hook_on_bias hook_pre_on_column hook_scales logits_argmax_and_max logits_banned logits_chunk
    logits_embedding_of_argmax logits_extra_class logits_first logits_grouped_classes logits_gumbel_without_noise
    logits_halves logits_hinge logits_labels_of_smoothing logits_last logits_loss logits_mean_of_last_dim
    logits_multi_label logits_narrow logits_nll_sum_of_top logits_one_hot logits_padded logits_positions
    logits_reversed_classes logits_shifted_and_ignored logits_soft_embedding logits_split logits_sum_by_numel
    logits_temperature_by_width logits_topk logits_uniform_mixed logits_view logits_width logits_z_loss padding_first
    parametrized_pruned right sparse_gradient sums_in_fp32 sums_pad_constant_zero tokens_known_as_number
    towers_contrast towers_swapped verify_norm weights_demodulated weights_in_place_weight weights_weight_as_input
    weights_weight_with_transpose
    """.split()  # noqa: SIM905, a list of lines of one name each
)
