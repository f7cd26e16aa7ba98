"""A layer as a list of named stages.

Each stage says what it reads and writes in the values of its micro-batch; that, not its place in a list, decides when
it may run. One rank runs the list in order, the overlap schedules interleave two micro-batches, the stepper stops
between stages, the trace names tensors by them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from refmodel.experts import gated_mlp, project, quantize_rows, run_experts
from refmodel.linear import linear
from refmodel.mla import attend_batch, project_query_and_latent
from refmodel.norm import normalise
from refmodel.router import route
from refmodel.state import State
from refmodel.trace import Scope, recording

# rows of experts that share what is done row by row: as many as stay in a core's cache
_TOGETHER = 256


class Stage(NamedTuple):
    """`run(state, layer, scope)` reads and writes `state.values` under the names declared here."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable


def add(state, a, b, point):
    """a + b, rounded once."""
    return state.numerics.store(state.numerics.widen(a) + state.numerics.widen(b), point)


def add_branch(state, branch, scope):
    """The residual stream with `branch` added to it. Under `norm_input = "sum"` the next norm reads the sum as it was
    before it was rounded."""
    values, numerics = state.values, state.numerics
    total = numerics.widen(values["hidden"]) + numerics.widen(branch)  # [T, D]
    values["hidden"] = numerics.store(total, "residual")
    if numerics.switches.norm_input == "sum":
        values["sum"] = total
    scope.emit("residual", values["hidden"])


def normalise_stream(state, weight):
    """RMSNorm of the residual stream."""
    x = state.values.pop("sum", state.values["hidden"])
    return normalise(x, weight, state.config.rms_norm_eps, state.numerics)


def embed(state, layer, scope):
    hidden = state.numerics.store(state.weights.embedding[state.batch.token_ids], "embedding")  # [T, D]
    scope.emit("hidden", hidden)
    state.values["hidden"] = hidden


def attn_proj(state, layer, scope):
    weights = state.weights.layer(layer)
    x = normalise_stream(state, weights.input_norm)
    scope.emit("norm", x)
    query, row = project_query_and_latent(state, weights, x, scope)
    for segment in state.batch.segments:
        segment.cache.write(layer, segment.cache_offset, row[segment.start : segment.stop])
    state.values["query"] = query


def attn_core(state, layer, scope):
    weights, values, config = state.weights.layer(layer), state.values, state.config
    query = values.pop("query")  # [T, H, N + P]
    heads, lse = attend_batch(state, weights, layer, query)
    scope.emit("heads", heads)
    scope.emit("lse", lse)
    out = project(heads.reshape(len(heads), math.prod(heads.shape[1:])), weights.o, state.numerics)  # [T, D]
    scope.emit("out", out)
    add_branch(state, out, scope)
    x = normalise_stream(state, weights.post_norm)
    scope.emit("norm", x)
    values["ffn_input"] = x
    if config.is_moe_layer(layer):
        routing = route_tokens(state, weights, x, scope.under("router"))
        values["topk_idx"], values["topk_weights"] = routing.topk_idx, routing.topk_weights


def route_tokens(state, weights, x, scope):
    """Router logits and the selection of experts."""
    config, numerics = state.config, state.numerics
    logits = linear(numerics.widen(x), weights.router)  # [T, E]
    if numerics.switches.router_dtype == "activation":
        logits = numerics.widen(numerics.store(logits, "linear"))
    logits = numerics.store(logits, "router_logits")
    routing = route(
        logits,
        weights.correction_bias,
        top_k=config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=config.routed_scaling_factor if numerics.switches.routed_scale_on == "weights" else 1.0,
        norm_topk_prob=config.norm_topk_prob,
        scoring_func=config.scoring_func,
        topk_method=config.topk_method,
        norm_eps=numerics.switches.router_norm_eps,
        with_margin=recording(),
    )
    scope.emit("logits", logits)
    scope.emit("topk_idx", routing.topk_idx)
    scope.emit("topk_weights", routing.topk_weights)
    scope.emit("margin", routing.margin)
    return routing


def dispatch_send(state, layer, scope):
    values = state.values
    # the expert input is quantised once, before dispatch, by the model's recipe: gate and up multiply those codes
    payload = values["ffn_input"]
    if state.numerics.fp8:
        payload = quantize_rows(payload, state.numerics)
        scope.emit("codes", payload.codes)
        scope.emit("scale", payload.scale)
    exchange = state.exchange(layer)
    exchange.dispatch_send(payload, values["topk_idx"], values["topk_weights"])
    values["exchange"] = exchange


def dispatch_forward(state, layer, scope):
    state.values["exchange"].dispatch_forward()


def dispatch_recv(state, layer, scope):
    state.values["pairs"] = state.values["exchange"].dispatch_recv()


def experts(state, layer, scope):
    pairs, exchange = state.values.pop("pairs"), state.values["exchange"]
    all_experts = state.weights.layer(layer).experts
    slots = exchange.pair_slots() if recording() else None  # row of each pair among [T * K] of the whole batch
    emit = None

    def expert_of(e):  # the ids of pairs are this rank's own slots
        return all_experts[exchange.logical_expert(e)]

    if slots is not None:

        def emit(name, array, start, stop):
            Scope(scope.prefix, slots[start:stop]).emit(name, array)

    rows = np.empty((len(pairs.row), state.config.hidden_size), state.numerics.activation)
    together = _TOGETHER if all_experts.kept else 0  # what is decoded for one call is held one expert at a time
    state.values["expert_rows"] = run_experts(pairs, expert_of, state.numerics, rows, together, emit)
    if slots is not None:
        Scope(scope.prefix, slots).emit("out", rows)


def combine_send(state, layer, scope):
    state.values["exchange"].combine_send(state.values.pop("expert_rows"))


def combine_forward(state, layer, scope):
    state.values["exchange"].combine_forward()


def combine_recv(state, layer, scope):
    routed = state.values.pop("exchange").combine_recv()
    scope.emit("routed", routed)
    state.values["routed"] = routed


def shared(state, layer, scope):
    if state.config.n_shared_experts == 0:
        state.values["shared"] = None
        return
    weights = state.weights.layer(layer).shared
    out = gated_mlp(state.values["ffn_input"], weights, state.numerics, scope.emit)
    scope.emit("out", out)
    state.values["shared"] = out


def merge(state, layer, scope):
    values = state.values
    routed, shared_out = values.pop("routed"), values.pop("shared")
    if state.numerics.switches.routed_scale_on == "output":
        scaled = state.numerics.widen(routed) * state.numerics.compute.type(state.config.routed_scaling_factor)
        routed = state.numerics.store(scaled, "combined_row")
    moe = routed if shared_out is None else add(state, routed, shared_out, "moe_output")
    scope.emit("moe", moe)
    add_branch(state, moe, scope)
    del values["ffn_input"], values["topk_idx"], values["topk_weights"]


def mlp(state, layer, scope):
    values = state.values
    out = gated_mlp(values.pop("ffn_input"), state.weights.layer(layer).mlp, state.numerics, scope.emit)
    scope.emit("out", out)
    add_branch(state, out, scope)


def final(state, layer, scope):
    """The last norm and the head; for the MTP layer its own norm, and the shared head."""
    values, weights = state.values, state.weights
    is_mtp = layer is not None
    if is_mtp:
        values.pop("sum", None)  # vLLM's MTP layer hands its norm the sum as it was rounded
    x = normalise_stream(state, weights.layer(layer).shared_head_norm if is_mtp else weights.norm)  # [T, D]
    scope.emit("norm", x)
    kept = state.numerics.switches.mtp_recycle if is_mtp else state.numerics.switches.mtp_hidden
    values["mtp_hidden"] = x if kept == "post_norm" else values["hidden"]
    head_rows = values.get("head_rows")
    logits = linear(state.numerics.widen(x if head_rows is None else x[head_rows]), weights.head)
    logits = state.numerics.store(logits, "logits")  # [T, vocab]
    scope.emit("logits", logits)
    values["logits"] = logits


ATTENTION = (
    Stage("attn_proj", ("hidden", "sum"), ("query", "cache"), attn_proj),
    Stage(
        "attn_core",
        ("hidden", "sum", "query", "cache"),
        ("hidden", "sum", "ffn_input", "topk_idx", "topk_weights"),
        attn_core,
    ),
)
DENSE_LAYER = (*ATTENTION, Stage("mlp", ("hidden", "ffn_input"), ("hidden", "sum"), mlp))
MOE_LAYER = (
    *ATTENTION,
    Stage("dispatch_send", ("ffn_input", "topk_idx", "topk_weights"), ("exchange",), dispatch_send),
    Stage("dispatch_forward", ("exchange",), ("exchange",), dispatch_forward),
    Stage("dispatch_recv", ("exchange",), ("pairs",), dispatch_recv),
    Stage("experts", ("pairs", "exchange"), ("expert_rows",), experts),
    Stage("combine_send", ("expert_rows", "exchange"), ("exchange",), combine_send),
    Stage("combine_forward", ("exchange",), ("exchange",), combine_forward),
    Stage("combine_recv", ("exchange",), ("routed",), combine_recv),
    Stage("shared", ("ffn_input",), ("shared",), shared),
    Stage("merge", ("hidden", "routed", "shared"), ("hidden", "sum"), merge),
)
EMBED = Stage("embed", ("token_ids",), ("hidden",), embed)
FINAL = Stage("final", ("hidden", "sum", "head_rows"), ("logits", "mtp_hidden"), final)


def stages_of(config, layer: int) -> tuple[Stage, ...]:
    """The stages of one layer, in the order in which one rank runs them."""
    return MOE_LAYER if config.is_moe_layer(layer) else DENSE_LAYER


def stage_scope(state: State, stage: Stage, layer: int | None = None) -> Scope:
    """Where the tensors of one stage of one layer are named."""
    return state.scope.under(stage.name if layer is None else f"layers.{layer}.{stage.name}")


def run_stage(state: State, stage: Stage, layer: int | None = None):
    """Run one stage of one layer (None for embed and the main model's final) and name its tensors."""
    stage.run(state, layer, stage_scope(state, stage, layer))
