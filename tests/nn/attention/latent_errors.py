"""Bad input of latent attention, for tests/repo/test_errors.py: the call (g: the group), the exception, its message."""

import tp_ext

WIDTHS = {"kv_lora_rank": 6, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}


def latent(group, **options):
    return tp_ext.ParallelLatentAttention(8, **{"num_heads": 4} | WIDTHS | options, group=group)


LATENT = [
    (
        "ParallelLatentAttention(8, 0, kv_lora_rank=6, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, group=g)",
        ValueError,
        "num_heads: 0 must be",
    ),
    ("LatentKVCache(2, 0, 6, 2)", ValueError, "max_seq: 0 must be"),
    ("latent(g, num_heads=1)", ValueError, "num_heads: .*num_heads = 1, num_kv_heads = 1, p = 2"),
    ("latent(g, kv_lora_rank=0)", ValueError, "kv_lora_rank: 0 must be an integer of at least 1"),
    ("latent(g, q_lora_rank=0)", ValueError, "q_lora_rank: 0 must be"),
    ("latent(g, qk_rope_head_dim=3)", ValueError, "rotary_dim: 3 must be even"),
    ("latent(g, v_head_dim=2.0)", ValueError, "v_head_dim: 2.0 must be"),
    ("latent(g, rope=RotaryEmbedding(4))", ValueError, "rope: RotaryEmbedding.* must be a base or .* of 2, or None"),
    ("latent(g, dropout=1.0)", ValueError, "dropout: 1.0 must be a probability"),
    ("latent(g, scale=-1)", ValueError, "scale: -1 must be a finite number above 0, or None"),
    ("latent(g, bias=3)", TypeError, "bias: 3 must be True or False"),
    ("latent(g, norm_eps='small')", TypeError, "eps: 'small' must be a number"),
    ("latent(g).kv_a_proj_with_mqa(ones(()))", ValueError, r"x: shape \(\) must end in in_features = 8"),
    ("latent(g)(ones(1, 4, 7))", ValueError, r"x: shape \(1, 4, 7\) must end in in_features = 8"),
    ("latent(g, q_lora_rank=3)(ones(1, 4, 8).double())", TypeError, "x: dtype torch.float64 must be that of weight"),
    ("latent(g)(ones(4, 8))", ValueError, r"x: shape \(4, 8\).*exactly one of batch_size = None"),
    ("latent(g, **sp)(ones(1, 2, 8))", ValueError, r"x: shape \(1, 2, 8\) must be \[tokens_local, hidden\]"),
    ("latent(g)(ones(4, 8), batch_size=3)", ValueError, "batch_size: 3 must divide the number of tokens, 4"),
    ("latent(g)(ones(4, 8), cu_seqlens=[0, 3])", ValueError, r"cu_seqlens: \[0, 3\] must .* tokens, 4"),
    ("latent(g)(ones(1, 4, 8), attn_mask=ones(2, 4, 4))", ValueError, r"attn_mask: shape \(2, 4, 4\) must be"),
    ("latent(g, rope=None)(ones(1, 4, 8), cos_sin=(ones(4, 1),) * 2)", ValueError, "cos_sin: must not be given to a"),
]
