"""What must come of each variant of the tensors: MTP layers, heads, scales, dtypes, quantisation schemes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
from checkpoint_changes import (
    BF16,
    add,
    apart,
    bad_scale,
    both,
    cast,
    compressed_fp8,
    drop,
    fields,
    fp8_eh_proj,
    indexer,
    int4,
    nvfp4,
    plain_mtp,
    scales,
    without,
)
from checkpoint_variants import MOE, MTP, TINY, Case

TIED = replace(TINY, tie_word_embeddings=True)

TENSOR_CASES = (
    # MTP
    Case("MTP layer there, not counted", fields(num_nextn_predict_layers=0), notices=("layer 3: an MTP layer",)),
    Case(
        "MTP layer there, not said",
        without("num_nextn_predict_layers"),
        notices=("num_nextn_predict_layers: absent, 1 assumed: layer 3 has an eh_proj",),
    ),
    Case(
        "MTP layer counted, not there",
        drop(MTP),
        notices=("MTP unavailable: num_nextn_predict_layers = 1, but layer 3",),
        source="vllm-project/vllm#16450",
    ),
    Case(
        "MTP layer in part",
        drop(f"{MTP}eh_proj", f"{MTP}mlp.experts.2"),
        refused=("4 tensors are missing", "experts.2.gate_proj", "eh_proj"),
        source="huggingface/transformers#35688",
    ),
    Case("MTP layer without its norm", drop(f"{MTP}shared_head.norm"), refused=("shared_head.norm.weight",)),
    Case(
        "MTP layer without its own embedding and head",
        drop(f"{MTP}embed_tokens", f"{MTP}shared_head.head"),
        notices=("layers.3.embed_tokens.weight: absent, model.embed", "shared_head.head.weight: absent, lm_head"),
    ),
    Case("MTP eh_proj in FP8", fp8_eh_proj, "fp8", notices=("1 tensors that the family leaves",)),
    # embedding and head
    Case(
        "tied head", drop(f"{MTP}shared_head.head"), config=TIED, notices=("shared_head.head.weight: absent, model.e",)
    ),
    Case(
        "no head, not said",
        both(without("tie_word_embeddings"), drop("lm_head", "shared_head.head")),
        config=TIED,
        notices=("tie_word_embeddings: absent, True assumed: there is no lm_head", "shared_head.head.weight: absent"),
    ),
    Case("no head where one is declared", drop("lm_head"), refused=("1 tensors are missing", "lm_head.weight")),
    Case("names without model.", lambda v: v.rename(lambda n: n.removeprefix("model."))),
    # scales
    Case("scales in bfloat16", scales(dtype=BF16), "fp8", source="ggml-org/llama.cpp#14781"),
    Case("scales named weight_scale", scales("weight_scale"), "fp8", source="sgl-project/sglang#6054"),
    Case("scales named scale, E8M0", scales("scale", ml_dtypes.float8_e8m0fnu), "fp8"),
    Case(
        "an E8M0 scale that is NaN",
        both(scales(dtype=ml_dtypes.float8_e8m0fnu), bad_scale(np.nan)),
        "fp8",
        refused=("experts.5.up_proj.weight_scale_inv", "not a finite number"),
    ),
    Case("a negative scale", bad_scale(-1), "fp8", refused=("experts.5.up_proj.weight_scale_inv", ">= 0")),
    Case(
        "a scale that is missing",
        drop(f"{MOE}mlp.experts.5.up_proj.weight_scale_inv"),
        "fp8",
        refused=("experts.5.up_proj.weight is F8_E4M3", "experts.5.up_proj.weight_scale_inv is missing"),
        source="vllm-project/compressed-tensors#641",
    ),
    Case(
        "a scale without its weight",
        add(f"{MOE}mlp.gate.weight_scale_inv", np.ones((1, 2), np.float32)),
        "fp8",
        notices=("1 scales without an FP8 weight: ignored: model.layers.1.mlp.gate.weight_scale_inv",),
    ),
    Case("scales as integers", scales(dtype=np.int32), "fp8", refused=("weight_scale_inv is I32",)),
    Case(
        "one scale for the whole weight",
        both(apart, add(f"{MOE}self_attn.o_proj.weight_scale_inv", np.ones((), np.float32))),
        "fp8",
        refused=("o_proj.weight", "[2, 2]"),
    ),
    Case(
        "another block size",
        fields(quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]}),
        "fp8",
        notices=(),
        refused=("blocks of 32 x 32", "weight_block_size"),
    ),
    # FP8 or not
    Case(
        "bfloat16 copy with the config of its original",
        fields(quantization_config={"quant_method": "fp8"}),
        notices=("weight_block_size: absent", "activation_scheme: absent", "no weight is FP8: taken as an unquantised"),
        source="sgl-project/sglang#5617",
    ),
    Case(
        "FP8 without quantization_config",
        without("quantization_config"),
        "fp8-128",
        notices=("no quantization_config, but weights are FP8: 128 x 128",),
        source="sgl-project/sglang#12313",
    ),
    Case(
        "FP8 without quantization_config, other blocks",
        without("quantization_config"),
        "fp8",
        refused=("blocks of 128 x 128",),
    ),
    Case(
        "MTP layer in bfloat16 beside FP8",
        plain_mtp,
        "fp8",
        notices=("32 weights are not FP8",),
        source="vllm-project/vllm#25987",
    ),
    Case(
        "excluded from FP8, yet FP8",
        lambda v: v.config["quantization_config"].update(
            modules_to_not_convert=["model.layers.2.self_attn*", "lm_head"]
        ),
        "fp8",
        notices=("5 weights are excluded from FP8 by the config",),
    ),
    Case(
        "static activations",
        lambda v: v.config["quantization_config"].update(activation_scheme="static"),
        "fp8",
        notices=("activation_scheme is 'static'",),
    ),
    Case(
        "scales of activations and cache",
        both(
            add(f"{MOE}self_attn.o_proj.input_scale", np.ones((), np.float32)),
            add(f"{MOE}self_attn.kv_b_proj.k_scale", np.ones((), np.float32)),
        ),
        "fp8",
        notices=("2 scales of activations or cache: not used",),
    ),
    Case(
        "4-bit of awq",
        both(fields(quantization_config={"quant_method": "awq", "bits": 4}), drop("experts.0.up_proj")),
        refused=("unsupported: 4-bit (awq)",),
    ),
    Case("UE8M0 declared, and so it is", lambda v: v.config["quantization_config"].update(scale_fmt="ue8m0"), "fp8"),
    Case("NVFP4", nvfp4, refused=("unsupported: NVFP4 (modelopt)",)),
    Case(
        "bfloat16 copy with modelopt's file",
        lambda v: v.files.update({"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}}),
        notices=("no weight is FP8",),
    ),
    Case("int4 of compressed-tensors", int4, refused=("unsupported: int4 pack-quantized (compressed-tensors)",)),
    Case("FP8 of compressed-tensors", compressed_fp8, "fp8"),
    Case("float32 copy", cast(np.float32)),
    Case("float64 copy", cast(np.float64)),
    Case("float16 copy", cast(np.float16), notices=("weights are float16",)),
    Case("two float dtypes", cast(np.float32, "self_attn.o_proj"), notices=("BF16, 4 F32): the widest decides",)),
    Case("E5M2 weights", cast(ml_dtypes.float8_e5m2, "experts.3.up_proj"), refused=("dtype F8_E5M2", "experts.3.up")),
    Case("integer weights", cast(np.int8, "self_attn.o_proj"), refused=("o_proj.weight: dtype I8",)),
    Case("FP8 embedding", cast(ml_dtypes.float8_e4m3fn, "model.embed_tokens"), refused=("embed", "never quantised")),
    # sparse attention
    Case(
        "V3.2-like",
        indexer(index_topk=16, index_n_heads=2, index_head_dim=8, model_type="deepseek_v32"),
        "fp8",
        notices=("index_topk = 16: dense attention is exact", "12 tensors of the sparse-attention indexer"),
        source="vllm-project/vllm#28968",
    ),
    Case(
        "an indexer, not said",
        indexer(),
        "fp8",
        notices=("index_topk: absent, 2048 assumed", "index_topk = 2048", "12 tensors of the sparse-attention indexer"),
    ),
)
