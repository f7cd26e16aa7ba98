"""The multi-token-prediction layer: what stands before its ordinary layer.

Slot i joins the main model's state h_i with the token t_(i+1) and predicts t_(i+2). The released weights take the
embedding first, the reverse of the paper's figure (deepseek-ai/DeepSeek-V3#712).
"""

import numpy as np

from refmodel.layer import Stage
from refmodel.linear import linear
from refmodel.norm import normalise


def mtp_embed(state, layer, scope):
    """hidden = eh_proj [enorm(emb(t_(i+1))) ; hnorm(h_i)]; values["mtp_input"] holds h [T, D]."""
    weights, numerics = state.weights.layer(layer), state.numerics
    embedding = numerics.store(state.weights.embedding[state.batch.token_ids], "embedding")  # [T, D]
    if numerics.switches.mtp_zero_position_0:
        # vLLM masks the input at its position 0, which after the shift is the real token t_1 (vllm-project/vllm#33299)
        first = state.batch.positions - numerics.switches.mtp_position_shift == 0
        embedding = np.where(first[:, None], embedding.dtype.type(0), embedding)
    eps = state.config.rms_norm_eps
    e = normalise(embedding, weights.enorm, eps, numerics)
    h = normalise(state.values.pop("mtp_input"), weights.hnorm, eps, numerics)
    scope.emit("enorm", e)
    scope.emit("hnorm", h)
    joined = numerics.widen(np.concatenate([e, h], axis=1))  # [T, 2 D]
    hidden = numerics.store(linear(joined, weights.eh_proj), "linear")
    scope.emit("hidden", hidden)
    state.values["hidden"] = hidden


MTP_EMBED = Stage("mtp_embed", ("token_ids", "mtp_input"), ("hidden",), mtp_embed)
