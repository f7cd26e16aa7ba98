"""Capture from MLX-LM, by standing recorders in front of its modules. Runs in an environment with mlx and mlx-lm.

    python scripts/adapters/mlx_adapter.py REQUEST.json

MLX-LM's compiled functions (`mx.compile`) stay as they are: only whole modules are watched. It has no MTP layer.
"""

import importlib.metadata
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from names import EMBED, FINAL_NORM, LOGITS, layer_name
from request import Request, Result, main


class Watched:
    """A module's stand-in: calls it, shows (arguments, output) to `see`, and is the module in everything else."""

    def __init__(self, module, see):
        self._module, self._see = module, see

    def __call__(self, *args, **kwargs):
        output = self._module(*args, **kwargs)
        self._see(args, output)
        return output

    def __getattr__(self, name):
        return getattr(self._module, name)


class Recorder:
    """Names to arrays without their batch dimension, of one prefill."""

    def __init__(self):
        self.tensors, self._undo = {}, []

    def keep(self, name, array):
        self.tensors[name] = array[0] if array.shape[0] == 1 and array.ndim > 2 else array

    def watch(self, owner, attribute, see):
        """Put a stand-in for `owner.attribute` until `finish`."""
        module = getattr(owner, attribute)
        setattr(owner, attribute, Watched(module, see))
        self._undo.append((owner, attribute, module))

    def on(self, owner, attribute, name, pick=lambda args, output: output):
        """Keep the module's output, or what `pick` makes of arguments and output."""
        self.watch(owner, attribute, lambda args, output: self.keep(name, pick(args, output)))

    def finish(self):
        """Take the stand-ins away, compute what was seen, and return it."""
        for owner, attribute, module in reversed(self._undo):
            setattr(owner, attribute, module)
        mx.eval(self.tensors)
        return self.tensors


def watch_layer(recorder: Recorder, layer, index: int) -> None:
    """Watch every captured point inside one decoder layer."""

    def on(owner, attribute, point, pick=lambda args, output: output):
        recorder.on(owner, attribute, layer_name(index, point), pick)

    attn, mlp = layer.self_attn, layer.mlp
    on(layer, "input_layernorm", "attn_norm")
    on(attn, "kv_a_proj_with_mqa", "kv_a")
    on(attn, "kv_a_layernorm", "kv_latent")
    query = "q_proj" if attn.q_lora_rank is None else "q_b_proj"
    if attn.q_lora_rank is not None:
        on(attn, "q_a_proj", "q_a")
        on(attn, "q_a_layernorm", "q_a_norm")
    seen = {}
    recorder.watch(attn, query, lambda args, output: seen.update(q=output))

    def rotated(args, output):  # called for q_pe [1, H, T, P], then for k_pe [1, 1, T, P]
        if "q_pe" in seen:
            recorder.keep(layer_name(index, "k_pe"), output[0, 0])
            return
        seen["q_pe"] = output
        q_pe = output[0].swapaxes(0, 1)  # [T, H, P]
        plain = seen["q"].reshape(*q_pe.shape[:2], -1)[..., : -q_pe.shape[-1]]
        recorder.keep(layer_name(index, "q"), mx.concatenate([plain, q_pe], axis=-1))

    recorder.watch(attn, "rope", rotated)
    heads, value = attn.num_heads, attn.v_head_dim
    recorder.watch(
        attn,
        "o_proj",
        lambda args, output: (
            recorder.keep(layer_name(index, "attention"), args[0].reshape(-1, heads, value)),
            recorder.keep(layer_name(index, "o"), output),
        ),
    )
    on(layer, "post_attention_layernorm", "attn_residual", lambda args, output: args[0])
    on(layer, "post_attention_layernorm", "ffn_norm")
    if hasattr(mlp, "switch_mlp"):
        watch_moe(recorder, layer, index)
    else:
        on(layer, "mlp", "mlp")


def watch_moe(recorder: Recorder, layer, index: int) -> None:
    """Watch the routed and shared experts of one layer; the weighted sum is repeated here as MLX-LM takes it."""
    mlp, seen = layer.mlp, {}

    def routing(args, output):
        seen["weights"] = output[1]
        recorder.keep(layer_name(index, "router_logits"), args[0] @ mlp.gate.weight.T)
        recorder.keep(layer_name(index, "topk_idx"), output[0].astype(mx.int64))
        recorder.keep(layer_name(index, "topk_weights"), output[1])

    def combined(args, output):
        routed = (output * seen["weights"][..., None]).sum(axis=-2).astype(output.dtype)
        recorder.keep(layer_name(index, "routed"), routed)

    recorder.on(layer, "mlp", layer_name(index, "moe"))
    recorder.watch(mlp, "gate", routing)
    recorder.watch(mlp, "switch_mlp", combined)
    if mlp.config.n_shared_experts is not None:
        recorder.on(mlp, "shared_experts", layer_name(index, "shared"))


def capture(model, tokens: list[int]) -> dict:
    """Prefill one prompt; name -> array."""
    recorder, base = Recorder(), model.model
    recorder.on(base, "embed_tokens", EMBED)
    recorder.on(base, "norm", FINAL_NORM)
    recorder.on(model, "lm_head", LOGITS)
    for index, layer in enumerate(base.layers):
        watch_layer(recorder, layer, index)
        name = layer_name(index, "hidden" if hasattr(layer.mlp, "switch_mlp") else "dense_hidden")
        base.layers[index] = Watched(layer, lambda args, output, name=name: recorder.keep(name, output))
    try:
        model(mx.array([tokens]), cache=make_prompt_cache(model))
    finally:
        base.layers[:] = [layer._module for layer in base.layers]
        tensors = recorder.finish()
    return tensors


def generate(model, tokens: list[int], new_tokens: int) -> list[int]:
    """Greedy continuation, end-of-text ignored."""
    cache, step, out = make_prompt_cache(model), mx.array([tokens]), []
    for _ in range(new_tokens):
        out.append(int(mx.argmax(model(step, cache=cache)[0, -1])))
        step = mx.array([[out[-1]]])
    return out


def answer(request: Request) -> Result:
    """Answer one request of the `capture` command."""
    if request.engine_args:
        raise ValueError(f"engine arguments {sorted(request.engine_args)}: MLX-LM takes none here")
    if request.mtp:
        raise ValueError("MLX-LM drops the MTP layer of a checkpoint: nothing of it can be captured")
    model, _ = load_model(Path(request.model))
    model.set_dtype(getattr(mx, request.dtype), lambda dtype: mx.issubdtype(dtype, mx.floating))
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("mlx-lm", "mlx")]
    result = Result(engine=", ".join(versions))
    if request.tensors:
        mx.save_safetensors(f"{request.out}/rank.0.safetensors", capture(model, request.tokens[0]), {"format": "mlx"})
    result.generated = [generate(model, tokens, request.new_tokens) for tokens in request.tokens]
    return result


if __name__ == "__main__":
    main(answer)
