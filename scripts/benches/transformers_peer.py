"""Hugging Face transformers at our size, in the same process where it is installed; nothing where it is not.

Like for like: float32, inference mode, logits of the last token only, the cache on. Its weights are random ones of the
same shapes, for speed does not depend on their values. It keeps latents in the cache, as we do, and expands keys and
values of the whole context in every decode step: the naive form.
"""

import inspect
from functools import cache

import numpy as np

from scripts.benches.environment import blas_threads

EXPERTS = ("eager", "grouped_mm")


class Peer:
    """`candidates(kind, batch, tokens)` gives name -> function for each setting worth comparing with."""

    def __init__(self, config):
        self._config = config

    @classmethod
    def found(cls, config) -> "Peer | None":
        """None where torch or transformers is missing."""
        try:
            import torch  # noqa: F401
            import transformers  # noqa: F401
        except ImportError:
            return None
        return cls(config)

    def candidates(self, kind: str, batch: int, tokens: int) -> dict:
        """kind: `prefill` of `batch` prompts of `tokens`, or one `decode` step of `batch` requests after `tokens`."""
        make = {"prefill": self._prefill, "decode": self._decode}[kind]
        return {f"transformers, {experts} experts": make(experts, batch, tokens) for experts in EXPERTS}

    def _prefill(self, experts, batch, tokens):
        import torch

        ids, model = self._ids(batch, tokens), self._model(experts)

        def run():
            with torch.inference_mode():
                model(ids, logits_to_keep=1, use_cache=True)

        return run

    def _decode(self, experts, batch, tokens):
        import torch
        from transformers import DynamicCache

        ids, model = self._ids(batch, tokens), self._model(experts)
        past = DynamicCache(config=model.config)
        known = inspect.signature(model.forward).parameters
        cached = {"cache" if "cache" in known else "past_key_values": past, "logits_to_keep": 1, "use_cache": True}
        with torch.inference_mode():
            model(ids[:1], **cached)
            past.batch_repeat_interleave(batch)

        def run():
            if past.get_seq_length() != tokens:
                raise ValueError(f"the peer's cache holds {past.get_seq_length()} tokens, not {tokens}")
            with torch.inference_mode():
                model(ids[:, :1], **cached)
                past.crop(-1)

        return run

    def _ids(self, batch, tokens):
        import torch

        return torch.from_numpy(np.random.default_rng(0).integers(0, self._config.vocab_size, (batch, tokens)))

    @cache  # noqa: B019 - one peer lives as long as the run
    def _model(self, experts):
        import torch
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        torch.set_num_threads(blas_threads())
        fields = self._config.to_dict()
        fields.pop("quantization_config", None)
        config = DeepseekV3Config(**fields)
        config._attn_implementation = "sdpa" if experts == "eager" else "eager"  # the faster one with these experts
        config._experts_implementation = experts
        torch.manual_seed(0)
        return DeepseekV3ForCausalLM(config).to(torch.float32).eval()
