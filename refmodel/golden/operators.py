"""The model as a list of small operators between named tensors, each of which can run alone.

`refmodel.layer` runs stages; here every recorded tensor has the operator that makes it from other recorded tensors, so
that one operator can be replayed from whatever an engine had as its inputs. A test holds the two to each other bit for
bit. Keyword arguments of the operators are ways of getting them wrong: `mistakes` names them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from refmodel.golden import ffn_operators as ffn
from refmodel.golden import mla_operators as mla
from refmodel.golden.norm_operators import add, embed, hidden_norm, logits, mtp_join, norm, stream_norm


@dataclass(frozen=True)
class Context:
    """What operators need besides tensors: the model, and the rows.

    token_ids [T] (None where nobody says), lengths: rows of each request, one after the other; phase as in
    `Model.forward`; position_shift is added to every RoPE position (the MTP layer's slot i is position i + 1).
    offsets: cache slot of each request's first row (default 0). past(layer): for each request the cache rows
    [offset, C + P] before its first one; None where all offsets are 0.
    """

    model: object
    token_ids: np.ndarray | None = None
    lengths: tuple[int, ...] = ()
    phase: str = "prefill"
    position_shift: int = 0
    offsets: tuple[int, ...] = ()
    past: Callable[[int], list[np.ndarray]] | None = None

    @property
    def config(self):
        return self.model.config

    @property
    def numerics(self):
        return self.model.numerics

    @property
    def weights(self):
        return self.model.weights

    def slots(self) -> np.ndarray:
        """Cache slot of each row, [T]."""
        offsets = self.offsets or (0,) * len(self.lengths)
        return np.concatenate([o + np.arange(n) for o, n in zip(offsets, self.lengths)]).astype(np.int64)

    def positions(self) -> np.ndarray:
        """RoPE position of each row, [T]."""
        return self.slots() + self.position_shift

    def requests(self, layer: int, rows: np.ndarray) -> list[tuple[slice, int, np.ndarray]]:
        """For each request its rows here, its offset, and all its cache rows [offset + length, C + P]."""
        before = self.past(layer) if self.past is not None else [rows[:0]] * len(self.lengths)
        found, start = [], 0
        for length, old in zip(self.lengths, before):
            here = slice(start, start + length)
            found.append((here, len(old), np.concatenate([old, rows[here]])))
            start += length
        return found


class Operator(NamedTuple):
    """`run(context, *inputs, **mistake) -> tuple of outputs`, between tensors with these full names.

    kind: what it does, the same in every layer; mistakes are listed by it.
    """

    kind: str
    layer: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable


def _attention(config, L: int, hidden: str, stream: tuple[str, ...], summed: bool) -> list[Operator]:
    p, c = f"layers.{L}.attn_proj.", f"layers.{L}.attn_core."
    query = [p + "q_a", p + "q_a_norm"] if config.q_lora_rank is not None else [p + "norm"]
    ops = [Operator("input_norm", L, stream, (p + "norm",), partial(stream_norm, layer=L, weight="input_norm"))]
    if config.q_lora_rank is not None:
        ops += [
            Operator("q_a", L, (p + "norm",), (p + "q_a",), partial(mla.down, layer=L, part="q")),
            Operator("q_a_norm", L, (p + "q_a",), (p + "q_a_norm",), partial(norm, layer=L, weight="q_a_norm")),
        ]
    core = (p + "q", p + "kv_latent", p + "k_pe")
    after = (hidden, c + "out") if summed else (c + "residual",)
    return [
        *ops,
        Operator("q", L, (query[-1],), (p + "q",), partial(mla.query, layer=L)),
        Operator("kv_a", L, (p + "norm",), (p + "kv_a",), partial(mla.down, layer=L, part="kv")),
        Operator("kv_latent", L, (p + "kv_a",), (p + "kv_latent",), partial(mla.latent, layer=L)),
        Operator("k_pe", L, (p + "kv_a",), (p + "k_pe",), partial(mla.k_pe, layer=L)),
        Operator("attention", L, core, (c + "heads", c + "lse"), partial(mla.attention, layer=L)),
        Operator("o", L, (c + "heads",), (c + "out",), partial(mla.output, layer=L)),
        Operator("attention_residual", L, (hidden, c + "out"), (c + "residual",), partial(add, point="residual")),
        Operator("post_norm", L, after, (c + "norm",), partial(stream_norm, layer=L, weight="post_norm")),
    ]


def _mlp(L: int, stage: str, x: str, weight: str) -> list[Operator]:
    p = f"layers.{L}.{stage}."
    return [
        Operator("gate_up", L, (x,), (p + "gate", p + "up"), partial(ffn.gate_up, layer=L, weight=weight)),
        Operator("product", L, (p + "gate", p + "up"), (p + "product",), ffn.product),
        Operator("down", L, (p + "product",), (p + "out",), partial(ffn.down, layer=L, weight=weight)),
    ]


def _moe(config, numerics, L: int) -> list[Operator]:
    c, e = f"layers.{L}.attn_core.", f"layers.{L}.experts."
    router, x = c + "router.", c + "norm"
    idx, weights = router + "topk_idx", router + "topk_weights"
    selected = (idx, weights, router + "margin")
    moe = f"layers.{L}.merge.moe"
    routed, shared = f"layers.{L}.combine_recv.routed", f"layers.{L}.shared.out"
    ops = [
        Operator("router_logits", L, (x,), (router + "logits",), partial(ffn.router_logits, layer=L)),
        Operator("router", L, (router + "logits",), selected, partial(ffn.router, layer=L)),
    ]
    entering = (x,)
    if numerics.fp8:
        entering = tuple(f"layers.{L}.dispatch_send.{n}" for n in ("codes", "scale"))
        ops.append(Operator("quantize", L, (x,), entering, ffn.quantize_rows))
    ops += [
        Operator("expert_gate_up", L, (idx, *entering), (e + "gate", e + "up"), partial(ffn.expert_gate_up, layer=L)),
        Operator("product", L, (e + "gate", e + "up"), (e + "product",), ffn.product),
        Operator("expert_down", L, (idx, e + "product"), (e + "out",), partial(ffn.expert_down, layer=L)),
        Operator("combine", L, (idx, weights, e + "out"), (routed,), partial(ffn.combine, layer=L)),
    ]
    parts = (routed,)
    if config.n_shared_experts:
        ops += _mlp(L, "shared", x, "shared")
        parts = (routed, shared)
    ops.append(Operator("merge", L, parts, (moe,), ffn.merge))
    return ops


def _layer(config, numerics, L: int, hidden: str, stream: tuple[str, ...]) -> tuple[list[Operator], str, tuple]:
    """Operators of one layer, the name of the state that leaves it, and what the next norm of that state reads."""
    summed = numerics.switches.norm_input == "sum"
    ops, c = _attention(config, L, hidden, stream, summed), f"layers.{L}.attn_core."
    if config.is_moe_layer(L):
        ops += _moe(config, numerics, L)
        residual, branch = f"layers.{L}.merge.residual", f"layers.{L}.merge.moe"
    else:
        residual, branch = f"layers.{L}.mlp.residual", f"layers.{L}.mlp.out"
        ops += _mlp(L, "mlp", c + "norm", "mlp")
    inputs = (c + "residual", branch)
    ops.append(Operator("ffn_residual", L, inputs, (residual,), partial(add, point="residual")))
    return ops, residual, inputs if summed else (residual,)


def operators(model) -> list[Operator]:
    """The main model's operators in execution order."""
    config = model.config
    ops = [Operator("embed", None, (), ("embed.hidden",), embed)]
    hidden, stream = "embed.hidden", ("embed.hidden",)
    for L in range(config.num_hidden_layers):
        more, hidden, stream = _layer(config, model.numerics, L, hidden, stream)
        ops += more
    return [
        *ops,
        Operator("final_norm", None, stream, ("final.norm",), partial(stream_norm, layer=None, weight="norm")),
        Operator("logits", None, ("final.norm",), ("final.logits",), logits),
    ]


def main_state(config) -> str:
    """The name of the state that leaves the last layer of the main model."""
    last = config.num_hidden_layers - 1
    return f"layers.{last}.{'merge' if config.is_moe_layer(last) else 'mlp'}.residual"


def mtp_operators(model) -> list[Operator]:
    """The MTP layer's operators; its inputs are the main model's `final.norm` and the shifted tokens."""
    config, L = model.config, model.config.num_hidden_layers
    p = f"layers.{L}.mtp_embed."
    main = "final.norm" if model.numerics.switches.mtp_hidden == "post_norm" else main_state(config)
    ops = [
        Operator("enorm", L, (), (p + "enorm",), partial(mtp_join, layer=L, part="enorm")),
        Operator("hnorm", L, (main,), (p + "hnorm",), partial(hidden_norm, layer=L)),
        Operator("eh_proj", L, (p + "enorm", p + "hnorm"), (p + "hidden",), partial(mtp_join, layer=L, part="eh_proj")),
    ]
    more, hidden, _ = _layer(config, model.numerics, L, p + "hidden", (p + "hidden",))
    f = f"layers.{L}.final."
    return [
        *ops,
        *more,
        Operator("final_norm", L, (hidden,), (f + "norm",), partial(norm, layer=L, weight="shared_head_norm")),
        Operator("logits", L, (f + "norm",), (f + "logits",), logits),
    ]
