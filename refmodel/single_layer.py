"""One layer of a model, from a captured input: reads only the tensors that it touches."""

import numpy as np

from refmodel.cache import LatentCache
from refmodel.experts import LocalExchange
from refmodel.generate import Item
from refmodel.layer import route_tokens, run_stage, stages_of
from refmodel.model import make_batch
from refmodel.numerics import round_to
from refmodel.state import State
from refmodel.trace import Scope, record

#: what a layer can be asked for: part -> the tensor that it starts from
PARTS = {
    "layer": "the residual stream before the layer",
    "attention": "the residual stream before the layer",
    "ffn": "the normed input of the router and the experts, or of the dense MLP (attn_core.norm)",
}


def run_layer(model, layer: int, rows: np.ndarray, part: str = "layer", phase: str = "prefill") -> dict:
    """name -> array of every tensor of one layer, for one request of T tokens at positions 0 .. T - 1.

    rows [T, D] any float dtype: what PARTS says for `part`; rounded once to the activation dtype.
    Raises ValueError for a layer that the model does not have, another width, or an unknown part.
    """
    config = model.config
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"layer = {layer}: this model has layers 0 to {config.num_layers - 1}")
    if part not in PARTS:
        raise ValueError(f"part = {part!r}: must be one of {', '.join(PARTS)}")
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] != config.hidden_size:
        raise ValueError(f"input {rows.shape}: must be [tokens, hidden_size = {config.hidden_size}]")
    if rows.dtype not in (np.float32, np.float64, model.numerics.activation):
        rows = rows.astype(np.float32)
    rows = round_to(rows, model.numerics.activation)
    cache = LatentCache(model.new_pool())
    batch = make_batch([Item(0, np.zeros(len(rows), np.int64), cache, 0)], phase)
    state = State(model.weights, batch, lambda layer: LocalExchange(model.numerics), Scope())
    with record() as tensors:
        _run(state, layer, rows, part)
    return {"input": rows, **tensors}


def _run(state, layer, rows, part):
    stages = stages_of(state.config, layer)
    if part == "ffn":
        state.values.update(hidden=np.zeros_like(rows), ffn_input=rows)
        if state.config.is_moe_layer(layer):
            scope = state.scope.under(f"layers.{layer}.attn_core").under("router")
            routing = route_tokens(state, state.weights.layer(layer), rows, scope)
            state.values.update(topk_idx=routing.topk_idx, topk_weights=routing.topk_weights)
        stages = stages[2:]
    else:
        state.values["hidden"] = rows
        stages = stages[:2] if part == "attention" else stages
    for stage in stages:
        run_stage(state, stage, layer)
