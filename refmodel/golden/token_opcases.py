"""Operators on token rows: norm, rotary embedding, router, gated product, FP8 quantisation, at their edges."""

from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from fp8 import quantize
from fp8.rounding import to_bfloat16
from refmodel.config import ModelConfig, RopeScaling
from refmodel.experts import swiglu
from refmodel.golden.draws import normal, permutation
from refmodel.golden.optypes import OperatorSpec
from refmodel.norm import rms_norm
from refmodel.rope import apply_rope, softmax_scale, yarn_frequencies
from refmodel.router import route

ROWS = (1, 2, 63, 64, 65, 127, 128, 129)  # around the tile heights that kernels have
V3_ROWS = (1, 64, 65, 128)
ROUTER = MappingProxyType(dict(top_k=8, n_group=8, topk_group=4, routed_scaling_factor=2.5))


def _norm(key: str, rows: int, width: int, scale: float = 1.0, zero_row: int | None = None):
    x = normal(f"{key}/x", rows, width, scale=scale)
    if zero_row is not None:
        x[zero_row] = 0
    return {"x": x, "weight": normal(f"rms_norm/{width}/weight", width)}


def _norm_makers():
    made = {f"rows_{n}": partial(_norm, f"rms_norm/rows_{n}", n, 256) for n in ROWS}
    made["tiny_values"] = partial(_norm, "rms_norm/tiny_values", 3, 256, scale=2.0**-20)
    made["row_of_zeros"] = partial(_norm, "rms_norm/row_of_zeros", 3, 256, zero_row=1)
    made |= {f"v3_rows_{n}": partial(_norm, f"rms_norm/v3_rows_{n}", n, 7168) for n in V3_ROWS}
    made["v3_q_latent"] = partial(_norm, "rms_norm/v3_q_latent", 64, 1536)
    made["v3_kv_latent"] = partial(_norm, "rms_norm/v3_kv_latent", 64, 512)
    return made


def _rms_norm(x, weight):
    return {"out": to_bfloat16(rms_norm(x, weight, 1e-6))}


def _rope(key: str, positions, heads: int, yarn: bool = False):
    positions = np.asarray(positions, np.int64)
    inv_freq = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    if yarn:
        inv_freq, _ = yarn_frequencies(ModelConfig.preset("v3"))
    x = normal(f"{key}/x", len(positions), heads, 64)
    # in float32, so that a power that another machine rounds otherwise gives the same input
    return {"x": x, "positions": positions, "inv_freq": inv_freq.astype(np.float32)}


def _rope_makers():
    far, spread = (163839, 0, 4096), lambda rows: np.arange(rows) * 2521
    made = {f"rows_{n}": partial(_rope, f"rope/rows_{n}", np.arange(n) * 97, 3) for n in (1, 64, 65)}
    made["far_positions"] = partial(_rope, "rope/far_positions", far, 3)
    made |= {f"v3_rows_{n}": partial(_rope, f"rope/v3_rows_{n}", spread(n), 128, True) for n in (1, 64, 65)}
    made["v3_far_positions"] = partial(_rope, "rope/v3_far_positions", far, 128, True)
    made["v3_k_pe"] = partial(_rope, "rope/v3_k_pe", spread(65), 1, True)
    return made


def _apply_rope(x, positions, inv_freq):
    return {"out": to_bfloat16(apply_rope(x, positions, inv_freq))}


def _yarn(**changes):
    values = dict(rope_theta=10000.0, factor=40.0, original_max_position_embeddings=4096.0, beta_fast=32.0)
    values |= dict(beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    return {name: np.float64(value).reshape(()) for name, value in (values | changes).items()}


def _yarn_makers():
    return {
        "not_stretched": partial(_yarn, factor=1.0),
        "one_step_of_ramp": partial(_yarn, beta_fast=1.0),
        "two_mscales": partial(_yarn, mscale=0.707, mscale_all_dim=1.0),
        "v3_published": _yarn,
    }


def _yarn_run(rope_theta, **scaling):
    values = {name: float(value) for name, value in scaling.items()}
    values["original_max_position_embeddings"] = int(values["original_max_position_embeddings"])
    config = replace(ModelConfig.preset("v3"), rope_theta=float(rope_theta), rope_scaling=RopeScaling(**values))
    inv_freq, amplitude = yarn_frequencies(config)
    return {
        "inv_freq": inv_freq.astype(np.float32),
        "amplitude": np.float32([amplitude]),
        "softmax_scale": np.float32([softmax_scale(config)]),
    }


def _router(key: str, rows: int, experts: int, scale: float = 2.0, shift: float = 0.0, step: float = 0.0):
    logits = normal(f"{key}/logits", rows, experts, scale=scale).astype(np.float32)
    bias = normal(f"router/{experts}/bias", experts, scale=0.5).astype(np.float32) + np.float32(shift)
    if step:
        logits, bias = np.round(logits / np.float32(step)) * np.float32(step), np.zeros_like(bias)
    return {"logits": logits, "correction_bias": bias}


def _router_makers():
    made = {}
    for prefix, experts, rows in (("", 64, (1, 64, 129)), ("v3_", 256, (1, 64, 128, 1024))):
        made |= {f"{prefix}rows_{n}": partial(_router, f"router/{prefix}rows_{n}", n, experts) for n in rows}
        # a group masked with 0 would win where every choice is negative (vllm-project/vllm#13474)
        negative, ties = f"{prefix}negative_bias", f"{prefix}equal_scores"
        made[negative] = partial(_router, f"router/{negative}", 33, experts, scale=1.0, shift=-3.0)
        made[ties] = partial(_router, f"router/{ties}", 33, experts, step=0.5)
    return made


def _route(logits, correction_bias):
    idx, weights, margin = route(logits, correction_bias, **ROUTER)
    return {"topk_idx": idx, "topk_weights": weights, "margin": margin}


def _swiglu(key: str, rows: int, width: int, steep: bool = False):
    gate = normal(f"{key}/gate", rows, width, scale=3.0)
    if steep:
        gate[0, :2] = (-200.0, 200.0)  # exp(200) is no float32
    return {"gate": gate, "up": normal(f"{key}/up", rows, width)}


def _swiglu_makers():
    made = {f"rows_{n}": partial(_swiglu, f"swiglu/rows_{n}", n, 128) for n in ROWS}
    made["steep"] = partial(_swiglu, "swiglu/steep", 2, 128, True)
    made |= {f"v3_rows_{n}": partial(_swiglu, f"swiglu/v3_rows_{n}", n, 2048) for n in V3_ROWS}
    made["v3_dense_layer"] = partial(_swiglu, "swiglu/v3_dense_layer", 16, 18432)
    made["v3_steep"] = partial(_swiglu, "swiglu/v3_steep", 2, 2048, True)
    return made


def _swiglu_run(gate, up):
    return {"out": to_bfloat16(swiglu(gate, up))}


def _rows(key: str, rows: int, width: int, edges: bool = False):
    x = normal(f"{key}/x", rows, width)
    if edges:
        x[0, :128] = 0
        x[1, 128:256] = normal(f"{key}/small", 128, scale=2.0**-30)
        x[2, permutation(f"{key}/large", width)[:3]] = 2.0**100
    return {"x": x}


def _quantize_makers(name: str):
    made = {f"rows_{n}": partial(_rows, f"{name}/rows_{n}", n, 384) for n in ROWS}
    made["block_of_zeros"] = partial(_rows, f"{name}/block_of_zeros", 3, 384, True)
    made |= {f"v3_rows_{n}": partial(_rows, f"{name}/v3_rows_{n}", n, 7168) for n in V3_ROWS}
    made["v3_block_of_zeros"] = partial(_rows, f"{name}/v3_block_of_zeros", 3, 7168, True)
    return made


def _quantize(scale_format: str, x):
    made = quantize(x, (1, 128), "deepseek_v3", scale_format)
    return {"codes": made.codes, "scale": made.scale}


_SCALES = ("codes", "scale")
TOKEN_OPERATORS = (
    OperatorSpec("rms_norm", ("out",), _rms_norm, _norm_makers(), ("x",)),
    OperatorSpec("rope", ("out",), _apply_rope, _rope_makers(), ("x", "positions")),
    OperatorSpec("yarn", ("inv_freq", "amplitude", "softmax_scale"), _yarn_run, _yarn_makers(), (), "float32"),
    OperatorSpec("router", ("topk_idx", "topk_weights"), _route, _router_makers(), ("logits",), "float32"),
    OperatorSpec("swiglu", ("out",), _swiglu_run, _swiglu_makers(), ("gate", "up")),
    OperatorSpec("quantize", _SCALES, partial(_quantize, "float32"), _quantize_makers("quantize"), ("x",)),
    OperatorSpec("quantize_ue8m0", _SCALES, partial(_quantize, "ue8m0"), _quantize_makers("quantize_ue8m0"), ("x",)),
)
