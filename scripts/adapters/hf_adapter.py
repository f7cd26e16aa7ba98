"""Capture from Hugging Face transformers, by forward hooks. Runs in an environment with torch and transformers.

    python scripts/adapters/hf_adapter.py REQUEST.json

Nothing here depends on the CPU: a GPU build of torch runs it unmodified with `--engine-args device=cuda`.
"""

import importlib.metadata

import torch
from names import EMBED, FINAL_NORM, LOGITS, layer_name
from request import Request, Result, main
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3


class Recorder:
    """Names to tensors, filled by hooks; every tensor is cloned when it is seen and loses its batch dimension."""

    def __init__(self):
        self.tensors = {}

    def keep(self, name: str, tensor: torch.Tensor, shape: tuple | None = None) -> None:
        tensor = tensor.detach()
        tensor = tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
        tensor = tensor.reshape(shape) if shape else tensor
        self.tensors[name] = tensor.to("cpu", copy=True).contiguous()

    def output(self, name: str, pick=lambda output: output):
        """A forward hook that keeps a module's output, or the part of it that `pick` takes."""
        return lambda module, args, output: self.keep(name, pick(output))

    def input(self, name: str):
        """A forward hook that keeps a module's first input."""
        return lambda module, args, output: self.keep(name, args[0])


def load(path: str, dtype: str = "float32", device: str = "cpu", **engine_args):
    """The causal language model of a checkpoint directory, in eval mode, with a recording eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager", device_map=None, **engine_args
    )
    model.config._attn_implementation = "eager"
    return model.to(device).eval()


def attach(layer, index: int, config, recorder: Recorder) -> list:
    """Hook every captured point of one decoder layer; returns the handles."""
    attn, mlp, name = layer.self_attn, layer.mlp, lambda point: layer_name(index, point)
    keep = recorder.output
    points = [(layer.input_layernorm, keep(name("attn_norm"))), (attn.kv_a_proj_with_mqa, keep(name("kv_a")))]
    points += [(attn.kv_a_layernorm, keep(name("kv_latent"))), (attn.o_proj, keep(name("o")))]
    if attn.q_lora_rank is not None:
        points += [(attn.q_a_proj, keep(name("q_a"))), (attn.q_a_layernorm, keep(name("q_a_norm")))]
    points += [
        (layer.post_attention_layernorm, recorder.input(name("attn_residual"))),
        (layer.post_attention_layernorm, keep(name("ffn_norm"))),
    ]
    if hasattr(mlp, "gate"):
        points += [
            (mlp.gate, keep(name("router_logits"), lambda output: output[0])),
            (mlp.gate, keep(name("topk_weights"), lambda output: output[1])),
            (mlp.gate, keep(name("topk_idx"), lambda output: output[2])),
            (mlp.experts, keep(name("routed"))),
            (mlp.shared_experts, keep(name("shared"))),
            (mlp, keep(name("moe"))),
            (layer, keep(name("hidden"))),
        ]
    else:
        points += [(mlp, keep(name("mlp"))), (layer, keep(name("dense_hidden")))]
    return [module.register_forward_hook(hook) for module, hook in points] + [_attention_hook(attn, index, recorder)]


class _attention_hook:
    """Keep what enters and leaves the core attention of one layer: rotated q and k_pe, and the heads' output."""

    def __init__(self, attn, index: int, recorder: Recorder):
        self.attn, self.name = attn, f"refmodel_recording_{index}"
        rope = attn.qk_rope_head_dim

        def recording(module, query, key, value, mask, **kwargs):
            q = query[0].transpose(0, 1)  # [T, H, N+P], its rope part as transformers keeps it: in half-split order
            recorder.keep(layer_name(index, "q"), q, tuple(q.shape))
            new = key[0, 0, -q.shape[0] :, -rope:]  # the rows of this call: [T, P]
            recorder.keep(layer_name(index, "k_pe"), new)
            output, weights = modeling_deepseek_v3.eager_attention_forward(module, query, key, value, mask, **kwargs)
            recorder.keep(layer_name(index, "attention"), output)
            return output, weights

        ALL_ATTENTION_FUNCTIONS.register(self.name, recording)
        attn.config = _copy_with(attn.config, self.name)

    def remove(self):
        self.attn.config._attn_implementation = "eager"


def _copy_with(config, implementation: str):
    """A copy of the config for one attention module alone; masks keep being made for `eager`."""
    import copy

    config = copy.deepcopy(config)
    config._attn_implementation_internal = implementation
    return config


@torch.no_grad()
def capture(model, tokens: list[int], chunks: list[int] | None = None) -> tuple[dict, DynamicCache]:
    """Run one prompt and return (name -> tensor, cache). With `chunks` (lengths) the tensors are the last chunk's."""
    recorder, base = Recorder(), model.model
    handles = [
        base.embed_tokens.register_forward_hook(recorder.output(EMBED)),
        base.norm.register_forward_hook(recorder.output(FINAL_NORM)),
        model.lm_head.register_forward_hook(recorder.output(LOGITS)),
    ]
    for index, layer in enumerate(base.layers):
        handles += attach(layer, index, model.config, recorder)
    cache = DynamicCache(config=model.config)
    try:
        for part in torch.tensor(tokens, device=model.device).split(chunks or [len(tokens)]):
            model(part[None], cache=cache, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.tensors, cache


@torch.no_grad()
def generate(model, tokens: list[int], new_tokens: int) -> list[int]:
    """Greedy continuation, end-of-text ignored: the argmax of the logits, one token at a time."""
    cache, step, out = DynamicCache(config=model.config), torch.tensor([tokens], device=model.device), []
    for _ in range(new_tokens):
        logits = model(step, cache=cache, use_cache=True).logits[0, -1]
        out.append(int(logits.argmax()))
        step = torch.tensor([[out[-1]]], device=model.device)
    return out


def answer(request: Request) -> Result:
    """Answer one request of the `capture` command."""
    model = load(request.model, request.dtype, **request.engine_args)
    result = Result(engine=f"transformers {importlib.metadata.version('transformers')}, torch {torch.__version__}")
    if request.tensors:
        tensors, _ = capture(model, request.tokens[0])
        if request.mtp:
            from hf_mtp import capture_mtp, load_mtp

            mtp = load_mtp(model, request.model)
            tensors |= capture_mtp(model, mtp, request.tokens[0])
        save_file(tensors, f"{request.out}/rank.0.safetensors")
    result.generated = [generate(model, tokens, request.new_tokens) for tokens in request.tokens]
    return result


if __name__ == "__main__":
    main(answer)
