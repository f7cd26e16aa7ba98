"""Known ways of getting an operator wrong, as data: what was seen in public trackers, and how it is made.

`kinds`: the operators that can have the mistake; `how`: keywords of the operator that make it; `text` completes
"equals ours ...".
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """One known mistake."""

    name: str
    kinds: tuple[str, ...]
    how: dict
    text: str


# What sound engines do differently, where its effect is larger than a rounding of the output.
VARIANTS = (
    # transformers' eager attention, deepseek-ai/DeepSeek-V3 inference/model.py
    Mistake(
        "scores_narrow",
        ("attention",),
        {"narrow_scores": True},
        "with scores and probabilities rounded to bfloat16, as eager attention does",
    ),
    Mistake("logits_narrow", ("logits",), {"narrow": True}, "with logits rounded to bfloat16"),
)

NORMS = ("input_norm", "q_a_norm", "post_norm", "final_norm", "kv_latent", "hnorm")
INNER = ("q_a_norm", "kv_latent")
ROPE = ("q", "k_pe")
EXPERT = ("expert_gate_up", "expert_down")

MISTAKES = (
    # norms
    Mistake("norm_skipped", NORMS, {"skipped": True}, "with the norm left out"),
    Mistake("norm_twice", NORMS, {"twice": True}, "with the norm applied twice"),
    Mistake("norm_without_weight", NORMS, {"weighted": 0}, "without the norm's weight"),
    Mistake("norm_weight_twice", NORMS, {"weighted": 2}, "with the norm's weight applied twice"),
    Mistake("norm_plus_one", NORMS, {"plus_one": True}, "with 1 added to the norm's weight, as Gemma stores it"),
    Mistake("norm_centred", NORMS, {"centred": True}, "with the mean subtracted, as LayerNorm does"),
    Mistake("inner_eps_fixed", INNER, {"eps": 1e-6}, "with an epsilon of 1e-6 instead of rms_norm_eps"),
    Mistake("inner_eps_of_config", INNER, {"eps": "config"}, "with rms_norm_eps as the inner norm's epsilon"),
    # huggingface/transformers#44261: the epsilon of the config is ignored, or used where it should not be
    Mistake("norm_eps_1e-5", NORMS, {"eps": 1e-5}, "with an epsilon of 1e-5"),
    Mistake("norm_eps_1e-2", NORMS, {"eps": 1e-2}, "with an epsilon of 1e-2"),
    Mistake("latent_norm_over_rope", ("kv_latent",), {"over_all": True}, "with k_pe taken into the latent's norm"),
    # rotary embedding
    Mistake("rope_missing", ROPE, {"rotated": False}, "without RoPE"),
    # huggingface/transformers#39687, vllm-project/vllm#26995
    Mistake("rope_pairing", ROPE, {"other_pairs": True}, "with RoPE pairs half a vector apart on interleaved weights"),
    Mistake("rope_order", ROPE, {"halves": True}, "in half-split order: the same rotation, written de-interleaved"),
    Mistake("rope_position_plus_1", ROPE, {"shift": 1}, "with positions counted from 1"),
    Mistake("rope_position_minus_1", ROPE, {"shift": -1}, "with positions one too small"),
    Mistake("rope_plain", ROPE, {"plain": True}, "with plain frequencies instead of YaRN's"),
    Mistake("rope_base", ROPE, {"base": 10000.0}, "with a RoPE base of 10000"),
    Mistake("rope_conjugate", ROPE, {"conjugate": True}, "rotated the other way"),
    # ggml-org/llama.cpp#7118
    Mistake("rope_amplitude", ROPE, {"amplitude": "mscale"}, "with cos and sin scaled by mscale as well"),
    Mistake("rope_in_front", ("q",), {"front": True}, "with the first part of each head rotated instead of the last"),
    Mistake("q_rope_first", ("q",), {"rope_first": True}, "with each head's rope part before its nope part"),
    Mistake("q_heads_inside", ("q",), {"heads_inside": True}, "with heads as the inner axis of q_b's rows"),
    Mistake("k_pe_normed", ("k_pe",), {"normed": True}, "with k_pe normalised"),
    Mistake("k_pe_first", ("k_pe",), {"first": True}, "with k_pe taken from the front of kv_a"),
    # attention
    # NVIDIA/Megatron-LM#1429, huggingface/optimum-intel#1877
    Mistake("mscale_missing", ("attention",), {"scale": "no_mscale"}, "with mscale missing in the softmax scale"),
    Mistake("mscale_once", ("attention",), {"scale": "mscale_once"}, "with mscale once instead of squared"),
    Mistake("scale_latent", ("attention",), {"scale": "latent"}, "with a softmax scale by the latent's width"),
    Mistake("scale_nope", ("attention",), {"scale": "nope"}, "with a softmax scale by the nope width alone"),
    Mistake("scale_none", ("attention",), {"scale": "none"}, "with no softmax scale"),
    Mistake("not_causal", ("attention",), {"causal": False}, "without the causal mask"),
    # lablup/mlxcel#998
    Mistake("mask_future", ("attention",), {"offset": 1}, "with one future key visible"),
    Mistake("mask_strict", ("attention",), {"offset": -1}, "with each query blind to its own key"),
    Mistake("mask_leak", ("attention",), {"leak": True}, "with keys of other requests visible"),
    # NVIDIA/Megatron-LM#3193
    Mistake("kv_b_split", ("attention",), {"split": "all_k_all_v"}, "with kv_b split as all K, then all V"),
    Mistake("kv_b_v_first", ("attention",), {"split": "v_first"}, "with each head of kv_b read as V, then K"),
    Mistake("rope_not_in_scores", ("attention",), {"without_rope": True}, "with scores from the nope part alone"),
    Mistake("softmax_base_2", ("attention",), {"base2": True}, "with powers of 2 instead of e in the softmax"),
    # sgl-project/sglang#40903
    Mistake("lse_base_2", ("attention",), {"lse_base2": True}, "with the logarithm of lse to base 2"),
    Mistake("lse_unscaled", ("attention",), {"lse_unscaled": True}, "with lse divided by the softmax scale"),
    Mistake("heads_rolled", ("attention",), {"heads_rolled": 1}, "with every head in the next head's place"),
    Mistake("o_heads_inside", ("o",), {"heads_inside": True}, "with heads as the inner axis before o"),
    Mistake("o_partial", ("o",), {"factor": 0.5}, "with half of the sum, as where one of two ranks is not added"),
    Mistake("o_reduced_twice", ("o",), {"factor": 2.0}, "added up twice over the ranks"),
    # residual stream
    Mistake("residual_missing", ("attention_residual", "ffn_residual"), {"first": 0.0}, "without the residual"),
    Mistake("residual_twice", ("attention_residual", "ffn_residual"), {"first": 2.0}, "with the residual added twice"),
    Mistake("branch_missing", ("attention_residual", "ffn_residual"), {"second": 0.0}, "without the branch"),
    Mistake("branch_twice", ("attention_residual", "ffn_residual"), {"second": 2.0}, "with the branch added twice"),
    # vllm-project/vllm#14809
    Mistake(
        "residual_rescaled",
        ("attention_residual", "ffn_residual"),
        {"first": 0.4, "second": 0.4},
        "divided by 2.5, the rescaling of float16",
    ),
    # router
    Mistake("router_narrow", ("router_logits",), {"narrow": True}, "with router logits rounded to bfloat16"),
    # vllm-project/vllm#13474, huggingface/transformers#45440
    Mistake("group_mask_zero", ("router",), {"fill": "zero"}, "with 0 instead of minus infinity in excluded groups"),
    Mistake("group_score_max", ("router",), {"topk_method": "group_max"}, "with groups ranked by their best expert"),
    Mistake("groups_ignored", ("router",), {"topk_method": "greedy"}, "without the limit to groups"),
    Mistake("bias_missing", ("router",), {"bias": "none"}, "without the correction bias"),
    Mistake("bias_negative", ("router",), {"bias": "negative"}, "with the correction bias subtracted"),
    # vllm-project/vllm#23640
    Mistake("bias_bfloat16", ("router",), {"bias": "bfloat16"}, "with the correction bias in bfloat16"),
    # vllm-project/vllm#12002, huggingface/transformers#41647
    Mistake("bias_in_weights", ("router",), {"weights": "biased"}, "with the correction bias left in"),
    Mistake("weights_softmax", ("router",), {"weights": "softmax"}, "with softmax in place of sigmoid"),
    Mistake("weights_over_all", ("router",), {"weights": "over_all"}, "normalised over all experts"),
    Mistake("weights_ascending", ("router",), {"weights": "ascending"}, "in the order of another sort"),
    Mistake("weights_not_normalised", ("router",), {"norm_topk_prob": False}, "without normalising the weights"),
    Mistake("weights_normalised", ("router",), {"norm_topk_prob": True}, "with the weights normalised"),
    # vllm-project/vllm#24119, #45037
    Mistake("factor_missing", ("router",), {"routed_scaling_factor": 1.0}, "without the routed scaling factor"),
    Mistake("factor_squared", ("router",), {"power": 2}, "with the routed scaling factor applied twice"),
    # quantisation
    Mistake("scale_per_row", ("quantize",), {"scale": "row"}, "with one scale per row instead of one per 128"),
    # huggingface/transformers#47030
    Mistake("scale_rounded_late", ("quantize",), {"scale": "power_of_two"}, "with the scale rounded after quantising"),
    Mistake("scale_inverse", ("quantize",), {"scale": "inverse"}, "with the reciprocal of the scale"),
    Mistake("scale_of_neighbour", ("quantize",), {"scale": "shifted"}, "with the scale of the block beside"),
    Mistake("codes_fnuz", ("quantize",), {"codes": "fnuz"}, "with the bits of E4M3 FNUZ"),
    # MLPs and experts
    Mistake("gate_up_swapped", ("gate_up", "expert_gate_up"), {"swapped": True}, "with gate and up swapped"),
    Mistake("silu_missing", ("product",), {"activation": "none"}, "without silu"),
    Mistake("silu_sigmoid", ("product",), {"activation": "sigmoid"}, "with sigmoid in place of silu"),
    Mistake("silu_on_up", ("product",), {"activation": "on_up"}, "with silu on up instead of gate"),
    Mistake("silu_gelu", ("product",), {"activation": "gelu"}, "with GELU in place of silu"),
    Mistake("silu_relu", ("product",), {"activation": "relu"}, "with ReLU in place of silu"),
    Mistake("expert_local_ids", EXPERT, {"experts": "local"}, "with expert ids of a rank taken for global ones"),
    Mistake("expert_next", EXPERT, {"experts": "next"}, "with the next expert's weights"),
    Mistake(
        "expert_strided", EXPERT, {"experts": "strided"}, "with experts dealt to ranks in turn instead of in blocks"
    ),
    Mistake("expert_scale_ignored", ("expert_gate_up",), {"scales_ignored": True}, "with the input's scales ignored"),
    Mistake("down_partial", ("down",), {"factor": 0.5}, "with half of the sum, as where one of two ranks is not added"),
    # sgl-project/sglang#28237
    Mistake("down_rescaled", ("down",), {"factor": 0.4}, "divided by a routed scaling factor of 2.5"),
    Mistake("down_per_rank_8", ("down",), {"factor": 8.0}, "added once on each of 8 ranks"),
    # combine
    Mistake("combine_unweighted", ("combine",), {"weighting": "none"}, "with no weights applied"),
    Mistake("combine_weighted_twice", ("combine",), {"weighting": "twice"}, "with the weights applied twice"),
    Mistake("combine_rescaled", ("combine",), {"weighting": "rescaled"}, "with the routed scaling factor once more"),
    Mistake("combine_unscaled", ("combine",), {"weighting": "unscaled"}, "without the routed scaling factor"),
    Mistake("combine_order", ("combine",), {"weighting": "by_id"}, "with weights in the order of expert ids"),
    Mistake("combine_last_missing", ("combine",), {"slots": "last_missing"}, "with the last expert missing"),
    Mistake("combine_counted_twice", ("combine",), {"slots": "first_twice"}, "with the first expert counted twice"),
    # merge
    Mistake("shared_missing", ("merge",), {"second": 0.0}, "without the shared expert"),
    Mistake("routed_missing", ("merge",), {"first": 0.0}, "without the routed experts"),
    # sgl-project/sglang#28237
    Mistake("shared_rescaled", ("merge",), {"second": 0.4}, "with the shared expert divided by 2.5"),
    Mistake("shared_scaled", ("merge",), {"second": 2.5}, "with the shared expert times 2.5"),
    Mistake("shared_per_rank_2", ("merge",), {"second": 2.0}, "with the shared expert added on each of 2 ranks"),
    Mistake("shared_per_rank_8", ("merge",), {"second": 8.0}, "with the shared expert added on each of 8 ranks"),
    Mistake("merge_rescaled", ("merge",), {"first": 2.5}, "with the routed part times 2.5"),
    # ends
    Mistake("embedding_scaled", ("embed",), {"scale": "sqrt"}, "times the root of the width, as Gemma does"),
    Mistake("embedding_shifted", ("embed",), {"shift": 1}, "of the token before"),
    Mistake("head_tied", ("logits",), {"tied": True}, "with the embedding as head"),
    Mistake("head_capped", ("logits",), {"cap": 30.0}, "with logits capped at 30"),
    # MTP
    # deepseek-ai/DeepSeek-V3#712
    Mistake("eh_proj_order", ("eh_proj",), {"swapped": True}, "with the hidden state before the embedding"),
    Mistake("mtp_hidden_side", ("hnorm",), {"other_side": True}, "from the state on the other side of the final norm"),
    # vllm-project/vllm#14137
    Mistake("mtp_unshifted", ("enorm",), {"unshifted": True}, "with tokens not shifted"),
    Mistake("mtp_zero_first", ("enorm",), {"zero_first": True}, "with the embedding at position 0 set to zero"),
)


def variants_of(kind: str) -> list[Mistake]:
    """What sound engines do differently in one kind of operator."""
    return [variant for variant in VARIANTS if kind in variant.kinds]


def mistakes_of(kind: str) -> list[Mistake]:
    """The known mistakes of one kind of operator."""
    return [mistake for mistake in MISTAKES if kind in mistake.kinds]
