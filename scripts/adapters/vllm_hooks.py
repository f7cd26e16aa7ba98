"""Hooks inside vLLM's worker processes. The functions are sent there by `LLM.collective_rpc`, so they live in a module.

Every worker keeps what its own rank computed and writes `rank.R.safetensors`; how the parts of several ranks make the
whole (heads side by side, partial sums) is said by `JOINS`.
"""

from typing import NamedTuple

import torch
from names import EMBED, FINAL_NORM, LAYER_POINTS, LOGITS, layer_name, mtp_name
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

    def on_call(self, module, see):
        """`see(args, kwargs, output)` on every call of a module."""

        def hook(module, args, kwargs, output):
            see(args, kwargs, output)

        self.undo.append(module.register_forward_hook(hook, with_kwargs=True).remove)

    def on_output(self, module, name, pick=lambda output: output, rows=None):
        """Keep a module's output, or the part of it that `pick` takes."""
        self.on_call(module, lambda args, kwargs, output: self.keep(name, pick(output), rows))

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
        _Layer(recorder, index).hook(layer)
    recorder.on_output(model.norm, FINAL_NORM, lambda output: output[0])
    drafter = getattr(worker.model_runner, "drafter", None)
    if drafter is not None:
        _hook_mtp(recorder, drafter.model)
        recorder.on_method(drafter, "propose", lambda args, kwargs, output: recorder.drafts.append(output.tolist()))


class _Layer(NamedTuple):
    """One decoder layer to be hooked, under one index, of which the first `rows` rows are kept (None: the prompt's)."""

    recorder: Recorder
    index: int
    rows: int | None = None

    def keep(self, point, tensor):
        self.recorder.keep(layer_name(self.index, point), tensor, self.rows)

    def on(self, module, point, pick=lambda output: _first(output)):
        self.recorder.on_output(module, layer_name(self.index, point), pick, self.rows)

    def hook(self, layer):
        """Hook every captured point of the layer."""
        self._hook_attention(layer.self_attn)
        self.on(layer.input_layernorm, "attn_norm")
        self.on(layer.post_attention_layernorm, "attn_residual", lambda output: output[1])
        self.on(layer.post_attention_layernorm, "ffn_norm")
        is_moe = hasattr(layer.mlp, "experts")
        if is_moe:
            self._hook_moe(layer.mlp)
        else:
            self.on(layer.mlp, "mlp")
        self.on(layer, "hidden" if is_moe else "dense_hidden", lambda output: output[0] + output[1])

    def _hook_attention(self, attn):
        if attn.q_lora_rank is None:
            self.on(attn.kv_a_proj_with_mqa, "kv_a")
        else:
            self.on(attn.fused_qkv_a_proj, "q_a", lambda output: output[0][..., : attn.q_lora_rank])
            self.on(attn.fused_qkv_a_proj, "kv_a", lambda output: output[0][..., attn.q_lora_rank :])
            self.on(attn.q_a_layernorm, "q_a_norm")

        def core(args, kwargs, output):
            q, kv_latent, k_pe = args[:3]
            self.keep("q", q)
            self.keep("kv_latent", kv_latent)
            self.keep("k_pe", k_pe.reshape(k_pe.shape[0], -1))
            self.keep("attention", output.reshape(output.shape[0], -1, attn.v_head_dim))

        self.recorder.on_call(attn.mla_attn.mla_attn, core)
        self.on(attn.o_proj, "o")

    def _hook_moe(self, mlp):
        runner = mlp.experts  # the weights add up to 1: the routed scaling factor multiplies the output, afterwards

        def routing(args, kwargs, output):
            weights, ids = output
            self.keep("topk_idx", ids.to(torch.int64))
            self.keep("topk_weights", weights)

        self.on(mlp.gate, "router_logits")
        self.on(mlp, "moe")
        if mlp.shared_experts is not None:
            self.on(mlp.shared_experts, "shared")
        if not runner.is_monolithic:  # a monolithic kernel routes inside itself
            self.recorder.on_method(runner.router, "select_experts", routing)
            experts = runner.routed_experts
            self.recorder.on_method(experts, "forward_modular", lambda a, k, out: self.keep("routed", out))


def _hook_mtp(recorder, draft_model):
    rows = recorder.rows - 1  # the last slot holds the sampled token, which the prompt does not
    for index, layer in draft_model.model.layers.items():
        for point in ("enorm", "hnorm", "eh_proj"):
            recorder.on_output(getattr(layer, point), mtp_name(index, point), rows=rows)
        _Layer(recorder, int(index), rows).hook(layer.mtp_block)
        recorder.on_output(layer.shared_head, mtp_name(index, "norm"), rows=rows)


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
    for index, layer in drafter.model.model.layers.items() if drafter is not None else ():
        norm, head = recorder.tensors.get(mtp_name(index, "norm")), layer.shared_head.head
        if norm is not None:
            logits = drafter.model.model.logits_processor(head, norm.to(head.weight.device))
            recorder.tensors[mtp_name(index, "logits")] = logits.float().cpu().contiguous()
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
