"""Hugging Face transformers at size A, in the same process where it is installed; nothing where it is not."""

from functools import cache

import numpy as np

from scripts.benches.size_a import SIZE_A

EXPERTS = ("eager", "grouped_mm")


def candidates(kind: str, batch: int | None = None) -> dict:
    """name -> function for the settings of transformers that are worth comparing with."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        return {}
    if kind == "prefill":
        sizes = (1, 4)
        return {f"prefill {b} x 512, transformers {e}": _prefill(e, b) for e in EXPERTS for b in sizes}
    return {f"decode {batch}, context 512, transformers {e}": _decode(e, batch) for e in EXPERTS}


@cache
def _model(experts):
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.set_num_threads(1)
    fields = SIZE_A.to_dict()
    fields.pop("quantization_config", None)
    config = DeepseekV3Config(**fields)
    config._attn_implementation = "sdpa" if experts == "eager" else "eager"
    config._experts_implementation = experts
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval()


def _prefill(experts, batch):
    import torch

    ids = torch.from_numpy(np.random.default_rng(0).integers(0, SIZE_A.vocab_size, (batch, 512)))

    def run():
        with torch.inference_mode():
            _model(experts)(ids, logits_to_keep=1, use_cache=True)

    return run


def _decode(experts, batch):
    import torch

    ids = torch.from_numpy(np.random.default_rng(0).integers(0, SIZE_A.vocab_size, (batch, 512)))
    with torch.inference_mode():
        past = _model(experts)(ids[:1], logits_to_keep=1, use_cache=True).past_key_values
        past.batch_repeat_interleave(batch)
    token = ids[:, :1]

    def run():
        with torch.inference_mode():
            _model(experts)(token, past_key_values=past, logits_to_keep=1, use_cache=True)
            past.crop(512)

    return run
