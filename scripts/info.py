"""Say what a checkpoint is, what had to be assumed, how large it is, and why it would not load.

Reads headers only, so that a directory of 700 GB takes seconds.

Example: refmodel info path/to/checkpoint
"""

import argparse
import json
from pathlib import Path

from refmodel.checkpoint import EXAMPLE, Checkpoint
from refmodel.checkpoint_checks import block_size
from refmodel.config import ModelConfig
from refmodel.inventory import Amount, Inventory, expected_inventory, kv_bytes_per_token, take_inventory

INNER_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm, as Hugging Face computes them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel info`."""
    parser.add_argument(
        "directory",
        nargs="?",
        metavar="DIR",
        help="checkpoint directory: config.json and .safetensors (default: the packaged example)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: counts, bytes")


def run(args: argparse.Namespace) -> int:
    """Print the description; 0 if the checkpoint loads, 2 if it does not (the config is still described)."""
    path = Path(args.directory) if args.directory is not None else EXAMPLE
    try:
        checkpoint, reason = Checkpoint.open(path), None
        config, inventory, notices = checkpoint.config, take_inventory(checkpoint), checkpoint.notices
    except ValueError as error:
        checkpoint, reason = None, str(error)
        try:
            config = ModelConfig.from_pretrained(path)
        except ValueError:
            raise error from None  # not even a config: there is nothing to describe
        inventory, notices = expected_inventory(config), list(config.assumed)
    content = {
        "path": str(path),
        "loads": reason is None,
        "reason": reason,
        "files": len(checkpoint.files()) if checkpoint else None,
        "dtype_of_weights": checkpoint.dtype_of_weights if checkpoint else None,
        "notices": notices,
        "model": describe(config),
        **sizes(config, inventory),
    }
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        _print(content)
    return 0 if reason is None else 2


def describe(config: ModelConfig) -> dict[str, str]:
    """The config in words, one line for each part of the model."""
    scaling, stored = config.rope_scaling, config.quantization_config
    query = "no q latent" if config.q_lora_rank is None else f"q latent {config.q_lora_rank}"
    groups = "" if config.n_group == 1 else f", {config.topk_group} of {config.n_group} groups"
    rope = f"theta {config.rope_theta:g}, {'interleaved' if config.rope_interleave else 'half-split'}"
    if scaling is not None:
        length = scaling.original_max_position_embeddings
        rope += f", YaRN {scaling.factor:g} x {length} (mscale {scaling.mscale}, all_dim {scaling.mscale_all_dim})"
    lines = {
        "family": config.model_type,
        "layers": f"{config.num_hidden_layers}, {_dense_layers(config)} of them dense, "
        f"and {config.num_nextn_predict_layers} MTP",
        "width": f"hidden {config.hidden_size}, vocabulary {config.vocab_size}",
        "attention": f"{config.num_attention_heads} heads of {config.qk_nope_head_dim} + {config.qk_rope_head_dim}, "
        f"value {config.v_head_dim}, {query}, kv latent {config.kv_lora_rank} + {config.qk_rope_head_dim}",
        "RoPE": rope,
        "experts": f"{config.num_experts_per_tok} of {config.n_routed_experts}{groups}, width "
        f"{config.moe_intermediate_size}, {config.n_shared_experts} shared; dense MLP {config.intermediate_size}",
        "router": f"{config.scoring_func}, {config.topk_method}, weights "
        f"{'normalised' if config.norm_topk_prob else 'as they are'}, times {config.routed_scaling_factor:g}",
        "norms": f"epsilon {config.rms_norm_eps:g}; inside attention {INNER_NORM_EPS:g}, as Hugging Face has it",
        "quantisation": "none declared",
    }
    if stored is not None:
        rows, columns = block_size(config)
        scales = stored.scale_fmt or "float32"
        lines["quantisation"] = stored.unsupported or (
            f"{stored.fmt} in blocks of {rows} x {columns}, {scales} scales, {stored.activation_scheme} activations"
        )
    if config.index_topk is not None:
        lines["sparse attention"] = (
            f"an indexer chooses {config.index_topk} keys; computed dense, exact up to that many"
        )
    return lines


def _dense_layers(config: ModelConfig) -> int:
    return sum(not config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))


def sizes(config: ModelConfig, inventory: Inventory) -> dict:
    """Parameters and bytes of the model and of its parts, and bytes of latent cache per token."""
    return {
        "parameters": {
            "total": inventory.total.parameters,
            "activated_without_embedding_and_head": inventory.activated(head=False).parameters,
            "activated_with_head": inventory.activated().parameters,
            "activated_with_embedding_and_head": inventory.activated(embedding=True).parameters,
            "mtp_unique": inventory.mtp_unique.parameters,
            "mtp_activated_without_embedding_and_head": inventory.mtp_activated().parameters,
            "stored": inventory.stored.parameters,
        },
        "bytes": {
            "total": inventory.total.nbytes,
            "activated_with_head": inventory.activated().nbytes,
            "mtp_unique": inventory.mtp_unique.nbytes,
            "stored": inventory.stored.nbytes,
        },
        "parts": {
            f"{prefix}{part}": {"parameters": amount.parameters, "bytes": amount.nbytes}
            for prefix, parts in (("", inventory.main), ("mtp_", inventory.mtp))
            for part, amount in parts.items()
            if amount != Amount()
        },
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "kv_bytes_per_token_with_mtp": kv_bytes_per_token(config, mtp=True),
    }


# title, key, what is included
ROWS = (
    ("main model", "total", "embedding and head, not MTP"),
    ("activated per token", "activated_with_head", "head, not the embedding"),
    ("", "activated_without_embedding_and_head", "neither"),
    ("", "activated_with_embedding_and_head", "both"),
    ("MTP layers", "mtp_unique", "without copies of embedding and head"),
    ("MTP activated", "mtp_activated_without_embedding_and_head", "without embedding and head"),
    ("in the files", "stored", "all, with the MTP layers' copies"),
)


def _print(content: dict) -> None:
    print(f"{'checkpoint':17} {content['path']}")
    if content["loads"]:
        print(f"{'loads':17} yes: {content['files']} files, weights {content['dtype_of_weights']}")
    else:
        print(f"{'loads':17} no: {content['reason']}")
    for name, text in content["model"].items():
        print(f"{name:17} {text}")
    if not content["loads"]:
        print("\nComplete, and stored as the config says, it would hold:")
    print(f"\n{'':19} {'parameters':>17} {'':>9} {'bytes':>17}  includes")
    parameters, stored = content["parameters"], content["bytes"]
    for title, key, includes in ROWS:
        if key == "stored" and not content["loads"]:
            continue
        count, nbytes = parameters[key], f"{stored[key]:,}" if key in stored else ""
        print(f"{title:19} {count:17,} {billions(count):>9} {nbytes:>17}  {includes}")
    print(
        f"\nlatent cache: {content['kv_bytes_per_token']:,} bytes per token in bfloat16, "
        f"{content['kv_bytes_per_token_with_mtp']:,} with the MTP layers'"
    )
    for notice in content["notices"]:
        print(f"note: {notice}")


def billions(count: int) -> str:
    """A parameter count as people quote it: 36.63 B, 24.01 M."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
