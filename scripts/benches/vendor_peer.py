"""DeepSeek's own inference code on a CPU, from a folder that the user names: the fair peer for decode.

Its file model.py (github.com/deepseek-ai/DeepSeek-V3, inference/) decodes by absorbed MLA, as we do. Two things change
on the way in, in memory: its GPU kernels, which float32 weights never call, are replaced by functions that refuse, and
its bfloat16 by float32. It has a correction bias at hidden size 7168 only; here every router gets one, of zeros, since
without it groups are chosen by another rule.
"""

import sys
import types
from functools import cache
from pathlib import Path

from scripts.benches.environment import threads_at_work
from scripts.benches.size_a import next_tokens, prompts

_ROOM = 64  # cache slots beyond the context


class Peer:
    """`candidates(kind, batch, tokens)` and `source` as of the transformers peer."""

    def __init__(self, config, source, folder: Path):
        self._config, self._source, self._folder = config, source, folder

    @classmethod
    def found(cls, config, source, folder: Path | None) -> "Peer | None":
        """None where no folder is named. Raises ValueError where torch is missing."""
        if folder is None:
            return None
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise ValueError(f"--vendor {folder}: torch is needed to run it ({error})") from None
        return cls(config, source, folder)

    def candidates(self, kind: str, batch: int, tokens: int) -> dict:
        """kind: `prefill` of `batch` prompts of `tokens`, or one `decode` step of `batch` requests after `tokens`."""
        import torch

        model = self._model(tokens)
        if kind == "prefill":
            ids = torch.from_numpy(prompts(self._config, batch, tokens))
            return {"DeepSeek's inference code": lambda: model.forward(ids, 0).numpy()}
        ids = torch.from_numpy(next_tokens(self._config, batch))
        model.forward(torch.from_numpy(prompts(self._config, 1, tokens)), 0)  # fills the first row of its caches
        for name, cached in model.named_buffers():
            if name.endswith("cache"):
                cached[1:batch] = cached[:1]
        return {"DeepSeek's inference code": lambda: model.forward(ids, tokens).numpy()}

    @cache  # noqa: B019 - one peer lives as long as the run
    def _model(self, tokens):
        import torch

        torch.set_num_threads(threads_at_work())
        module, c = load(self._folder), self._config
        args = module.ModelArgs(
            max_batch_size=128, max_seq_len=tokens + _ROOM, vocab_size=c.vocab_size, dim=c.hidden_size,
            inter_dim=c.intermediate_size, moe_inter_dim=c.moe_intermediate_size, n_layers=c.num_hidden_layers,
            n_dense_layers=c.first_k_dense_replace, n_heads=c.num_attention_heads, n_routed_experts=c.n_routed_experts,
            n_shared_experts=c.n_shared_experts, n_activated_experts=c.num_experts_per_tok, n_expert_groups=c.n_group,
            n_limited_groups=c.topk_group, score_func=c.scoring_func, route_scale=c.routed_scaling_factor,
            q_lora_rank=c.q_lora_rank, kv_lora_rank=c.kv_lora_rank, qk_nope_head_dim=c.qk_nope_head_dim,
            qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim,
        )  # fmt: skip
        torch.set_default_dtype(torch.float32)
        model = module.Transformer(args).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(self._source.array(_public_name(name))))
        for layer in model.layers[c.first_k_dense_replace :]:
            layer.ffn.gate.bias = torch.nn.Parameter(torch.zeros(c.n_routed_experts), requires_grad=False)
        return model


_NAMES = {  # its parts of a name -> Hugging Face's
    "embed": "embed_tokens", "head": "lm_head", "attn": "self_attn", "ffn": "mlp", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wo": "o_proj",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip


def _public_name(name: str) -> str:
    """`layers.0.attn.wo.weight` is `model.layers.0.self_attn.o_proj.weight`."""
    public = ".".join(_NAMES.get(part, part) for part in name.split("."))
    return public if public.startswith("lm_head") else f"model.{public}"


def load(folder: Path):
    """model.py of `folder` as a module whose 16-bit floats are float32 ones and whose kernels refuse."""
    kernel = types.ModuleType("kernel")
    for name in ("act_quant", "weight_dequant", "fp8_gemm"):
        setattr(kernel, name, _refuse)
    module = types.ModuleType("vendor_model")
    source = (folder / "model.py").read_text(encoding="utf-8").replace("torch.bfloat16", "torch.float32")
    before = sys.modules.get("kernel")
    sys.modules["kernel"], sys.modules["vendor_model"] = kernel, module
    try:
        exec(compile(source, str(folder / "model.py"), "exec"), module.__dict__)
    finally:
        sys.modules.pop("kernel") if before is None else sys.modules.update(kernel=before)
    return module


def _refuse(*args, **kwargs):
    raise ValueError("a float32 model called a GPU kernel")
