"""The MTP layer of Hugging Face transformers: its weights copied by hand, its tensors captured like any layer's.

transformers reads MTP weights only at the released model's layer index; here any checkpoint's own tensors are copied.
"""

import json
from pathlib import Path

import torch
from hf_adapter import Recorder, attach
from names import mtp_name
from safetensors.torch import load_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel


def layer_tensors(path: str, layer: int) -> dict[str, torch.Tensor]:
    """Every tensor of one layer of a checkpoint directory, under its name after `model.layers.L.`."""
    folder, prefix = Path(path), f"model.layers.{layer}."
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    tensors = {}
    for file in sorted(files):
        for name, tensor in load_file(folder / file).items():
            if name.startswith(prefix):
                tensors[name[len(prefix) :]] = tensor
    return tensors


def load_mtp(model, path: str):
    """The `MtpModel` beside `model`, with the checkpoint's weights of the layer after the last."""
    config = model.config
    tensors = layer_tensors(path, config.num_hidden_layers)
    if not tensors:
        raise ValueError(f"{path}: no tensors of layer {config.num_hidden_layers}, so there is no MTP layer to run")
    mtp = MtpModel(model, 1).eval()
    mtp.layers.to(model.device, model.dtype)  # the layer alone: embedding, rotation and head belong to `model`
    mtp.layers[0].mtp_block.mlp.gate.float()  # as transformers keeps every gate
    experts = range(config.n_routed_experts)
    gate_up = [
        torch.cat([tensors.pop(f"mlp.experts.{e}.{part}_proj.weight") for part in ("gate", "up")]) for e in experts
    ]
    down = [tensors.pop(f"mlp.experts.{e}.down_proj.weight") for e in experts]
    state = {"mtp_block.mlp.experts.gate_up_proj": torch.stack(gate_up)}
    state["mtp_block.mlp.experts.down_proj"] = torch.stack(down)
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
    shared = {"embed_tokens.weight", "shared_head.head.weight"}
    for name, tensor in tensors.items():
        if name == "shared_head.norm.weight":
            state["post_norm.weight"] = tensor
        elif name not in shared:
            state[name if name in own else f"mtp_block.{name}"] = tensor
    mtp.layers[0].load_state_dict(state)
    return mtp


@torch.no_grad()
def capture_mtp(model, mtp, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Tensors of the MTP layer over all slots of a prompt: slot i sees the hidden state of token i and token i + 1."""
    layer, index, recorder = mtp.layers[0], model.config.num_hidden_layers, Recorder()
    ids = torch.tensor([tokens], device=model.device)
    hidden = model.model(ids).last_hidden_state[:, :-1]
    positions = torch.arange(1, len(tokens), device=model.device)[None]
    handles = attach(layer.mtp_block, index, mtp.config, recorder)
    cache = MtpCache(config=model.config.get_mtp_config())
    embeds = mtp.embed_tokens(ids[:, 1:])
    for point in ("enorm", "hnorm", "eh_proj"):
        handles.append(getattr(layer, point).register_forward_hook(recorder.output(mtp_name(index, point))))
    try:
        output = layer(
            inputs_embeds=embeds,
            previous_hidden_state=hidden,
            position_embeddings=mtp.rotary_emb(embeds, positions),
            position_ids=positions,
            cache=cache,
            **mtp.create_masks_for_mtp_layer(0, embeds, cache, positions),
        )
    finally:
        for handle in handles:
            handle.remove()
    recorder.keep(mtp_name(index, "norm"), output)
    recorder.keep(mtp_name(index, "logits"), mtp._project_to_logits(output))
    return recorder.tensors
