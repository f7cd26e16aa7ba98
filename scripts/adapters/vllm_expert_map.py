"""Give vLLM's CPU expert kernel the expert map that it ignores, so that expert parallelism can run on a CPU at all.

vLLM 0.32's `CPUUnquantizedExperts.apply` passes global expert ids to a kernel that holds this rank's experts only and
reads past their end. With `--engine-args fix_expert_map=true` the adapter loads this module in every worker before the
model: ids become local, and a slot whose expert lives elsewhere gets weight 0. The engine's own files stay as they are.
"""

import torch
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

_apply = cpu_moe.CPUUnquantizedExperts.apply


def local_slots(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(local ids, weights): slots of other ranks' experts name expert 0 with weight 0."""
    local = expert_map[topk_ids.long()].to(topk_ids.dtype)
    return local.clamp(min=0), torch.where(local < 0, torch.zeros_like(topk_weights), topk_weights)


def _apply_with_map(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs):
    expert_map = kwargs["expert_map"]
    if expert_map is not None:
        topk_ids, topk_weights = local_slots(topk_ids, topk_weights, expert_map)
    _apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs)


cpu_moe.CPUUnquantizedExperts.apply = _apply_with_map


class Extension:
    """What `worker_extension_cls` names, so that vLLM imports this module in its workers."""
