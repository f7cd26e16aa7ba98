"""Hooks inside vLLM's worker processes. The functions are sent there by `LLM.collective_rpc`, so they live in a module.

Every worker keeps what its own rank computed and writes `rank.R.safetensors`; how the parts of several ranks make the
whole (heads side by side, partial sums) is said by `JOINS`.
"""

import torch
from names import EMBED, FINAL_NORM, LAYER_POINTS, LOGITS, MTP_LOGITS, MTP_NORM, layer_name
from safetensors.torch import save_file

# Points whose ranks hold parts under tensor or expert parallelism; every other point is the same on every rank.
JOINS = {"q": "concat:1", "attention": "concat:1", "shared": "sum", "routed": "sum"}


class Recorder:
    """What one worker saw during one prefill of `rows` tokens."""

    def __init__(self, rows: int):
        self.rows, self.tensors, self.undo, self.drafts = rows, {}, [], []

    def keep(self, name: str, tensor: torch.Tensor, rows: int | None = None) -> None:
        if tensor.shape[0] >= self.rows and name not in self.tensors:  # later calls are single decode steps
            self.tensors[name] = tensor[: rows or self.rows].detach().to("cpu", copy=True).contiguous()

    def on_output(self, module, name, pick=lambda output: output):
        hook = lambda module, args, output: self.keep(name, pick(output))
        self.undo.append(module.register_forward_hook(hook).remove)

    def on_call(self, module, see):
        """`see(args, kwargs, output)` on every call."""
        hook = lambda module, args, kwargs, output: see(args, kwargs, output)
        self.undo.append(module.register_forward_hook(hook, with_kwargs=True).remove)

    def on_method(self, owner, method: str, see):
        """Wrap a method of one object: `see(args, kwargs, output)` on every call."""
        original = getattr(owner, method)

        def seeing(*args, **kwargs):
            output = original(*args, **kwargs)
            see(args, kwargs, output)
            return output

        object.__setattr__(owner, method, seeing)
        self.undo.append(lambda: object.__delattr__(owner, method))


def start(worker, rows: int) -> None:
    """Hook the model of this worker, and its MTP layer if it speculates."""
    recorder = worker.refmodel_recorder = Recorder(rows)
    causal_lm = worker.get_model()
    model = causal_lm.model
    recorder.on_output(model.embed_tokens, EMBED)
    for index, layer in enumerate(model.layers):
        _hook_layer(recorder, layer, index)
    recorder.on_output(model.norm, FINAL_NORM, lambda output: output[0])
    drafter = getattr(worker.model_runner, "drafter", None)
    if drafter is not None:
        _hook_mtp(recorder, drafter.model)
        recorder.on_method(drafter, "propose", lambda args, kwargs, output: recorder.drafts.append(output.tolist()))


def _hook_layer(recorder, layer, index, rows=None):
    attn, mlp = layer.self_attn, layer.mlp
    keep = lambda point, tensor: recorder.keep(layer_name(index, point), tensor, rows)
    on = lambda module, point, pick=_first: recorder.on_call(module, lambda a, k, output: keep(point, pick(output)))
    on(layer.input_layernorm, "attn_norm")
    if attn.q_lora_rank is None:
        on(attn.kv_a_proj_with_mqa, "kv_a")
    else:
        on(attn.fused_qkv_a_proj, "q_a", lambda output: output[0][..., : attn.q_lora_rank])
        on(attn.fused_qkv_a_proj, "kv_a", lambda output: output[0][..., attn.q_lora_rank :])
        on(attn.q_a_layernorm, "q_a_norm")

    def core(args, kwargs, output):
        q, kv_latent, k_pe = args[:3]
        keep("q", q)
        keep("kv_latent", kv_latent)
        keep("k_pe", k_pe.reshape(k_pe.shape[0], -1))
        keep("attention", output.reshape(output.shape[0], -1, attn.v_head_dim))

    recorder.on_call(attn.mla_attn.mla_attn, core)
    on(attn.o_proj, "o")
    on(layer.post_attention_layernorm, "attn_residual", lambda output: output[1])
    on(layer.post_attention_layernorm, "ffn_norm")
    if hasattr(mlp, "experts"):
        _hook_moe(recorder, mlp, keep, on)
    else:
        on(mlp, "mlp")
    point = "hidden" if hasattr(mlp, "experts") else "dense_hidden"
    on(layer, point, lambda output: output[0] + output[1])


def _hook_moe(recorder, mlp, keep, on):
    runner = mlp.experts
    factor = runner.routed_scaling_factor  # on vLLM's MoE output; here it is brought to where our router has it

    def routing(args, kwargs, output):
        weights, ids = output
        keep("topk_idx", ids.to(torch.int64))
        keep("topk_weights", weights * factor)

    on(mlp.gate, "router_logits")
    on(mlp, "moe")
    if mlp.shared_experts is not None:
        on(mlp.shared_experts, "shared")
    if not runner.is_monolithic:  # a monolithic kernel routes inside itself
        recorder.on_method(runner.router, "select_experts", routing)
        recorder.on_method(runner.routed_experts, "forward_modular", lambda a, k, out: keep("routed", out * factor))


def _hook_mtp(recorder, draft_model):
    rows = recorder.rows - 1  # the last slot holds the sampled token, which the prompt does not
    for index, layer in draft_model.model.layers.items():
        for norm in ("enorm", "hnorm"):
            name = f"layers.{index}.mtp_embed.{norm}"
            recorder.on_call(getattr(layer, norm), lambda a, k, out, name=name: recorder.keep(name, out, rows))
        _hook_layer(recorder, layer.mtp_block, int(index), rows)
        recorder.on_call(layer.shared_head, lambda a, k, out: recorder.keep(MTP_NORM, out, rows))


def _first(output):
    return output[0] if isinstance(output, tuple) else output


def finish(worker, folder: str) -> dict:
    """Unhook, compute the logits of all rows by the model's own method, write this rank's file; return drafts."""
    recorder = worker.refmodel_recorder
    for undo in recorder.undo:
        undo()
    drafter = getattr(worker.model_runner, "drafter", None)
    if FINAL_NORM in recorder.tensors:
        recorder.tensors[LOGITS] = _logits(worker.get_model(), recorder.tensors[FINAL_NORM])
    if MTP_NORM in recorder.tensors:
        model = drafter.model.model
        head = next(iter(model.layers.values())).shared_head.head
        logits = model.logits_processor(head, recorder.tensors[MTP_NORM].to(head.weight.device))
        recorder.tensors[MTP_LOGITS] = logits.cpu().contiguous()
    if folder:
        save_file(recorder.tensors, f"{folder}/rank.{worker.rank}.safetensors")
    return {"rank": worker.rank, "drafts": recorder.drafts}


def _logits(causal_lm, hidden):
    device = next(causal_lm.parameters()).device
    return causal_lm.compute_logits(hidden.to(device)).float().cpu().contiguous()


def joins(tensor_names) -> dict[str, str]:
    """How the ranks' parts of each tensor make the whole, for the names that are not the same on every rank."""
    rules = {LAYER_POINTS[point]: rule for point, rule in JOINS.items()}
    parts = {name: name.split(".", 2) for name in tensor_names if name.startswith("layers.")}
    return {name: rules[part[2]] for name, part in parts.items() if part[2] in rules}
