"""Hugging Face transformers at our size, in the same process where it is installed; nothing where it is not.

Like for like: our weights in float32, inference mode, logits of the last token only, the cache on. It keeps latents in
the cache, as we do, and expands keys and values of the whole context in every decode step: the naive form.
"""

import inspect
from functools import cache

import numpy as np

from scripts.benches.environment import threads_at_work
from scripts.benches.size_a import next_tokens, prompts

EXPERTS = ("eager", "grouped_mm")


class Peer:
    """`candidates(kind, batch, tokens)` gives name -> function for each setting worth comparing with.

    `source.array(name)` are the weights under Hugging Face's names.
    """

    def __init__(self, config, source):
        self._config, self._source = config, source

    @classmethod
    def found(cls, config, source) -> "Peer | None":
        """None where torch or transformers is missing."""
        try:
            import torch  # noqa: F401
            import transformers  # noqa: F401
        except ImportError:
            return None
        return cls(config, source)

    def candidates(self, kind: str, batch: int, tokens: int) -> dict:
        """kind: `prefill` of `batch` prompts of `tokens`, or one `decode` step of `batch` requests after `tokens`.

        The functions return the logits of the last tokens [B, vocab].
        """
        make = {"prefill": self._prefill, "decode": self._decode}[kind]
        return {f"transformers, {experts} experts": make(experts, batch, tokens) for experts in EXPERTS}

    def _prefill(self, experts, batch, tokens):
        import torch

        ids, model = torch.from_numpy(prompts(self._config, batch, tokens)), self._model(experts)

        def run():
            with torch.inference_mode():
                return model(ids, logits_to_keep=1, use_cache=True).logits[:, -1].numpy()

        return run

    def _decode(self, experts, batch, tokens):
        import torch
        from transformers import DynamicCache

        context = torch.from_numpy(prompts(self._config, 1, tokens))
        ids, model = torch.from_numpy(next_tokens(self._config, batch)), self._model(experts)
        past = DynamicCache(config=model.config)
        known = inspect.signature(model.forward).parameters
        cached = {"cache" if "cache" in known else "past_key_values": past, "logits_to_keep": 1, "use_cache": True}
        with torch.inference_mode():
            model(context, **cached)
            past.batch_repeat_interleave(batch)

        def run():
            if past.get_seq_length() != tokens:
                raise ValueError(f"the peer's cache holds {past.get_seq_length()} tokens, not {tokens}")
            with torch.inference_mode():
                logits = model(ids, **cached).logits[:, -1].numpy()
                past.crop(-1)
            return logits

        return run

    @cache  # noqa: B019 - one peer lives as long as the run
    def _model(self, experts):
        import torch
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        torch.set_num_threads(threads_at_work())
        fields = self._config.to_dict()
        fields.pop("quantization_config", None)
        config = DeepseekV3Config(**fields)
        config._attn_implementation = "sdpa" if experts == "eager" else "eager"  # the faster one with these experts
        config._experts_implementation = experts
        model = DeepseekV3ForCausalLM(config).to(torch.float32).eval()
        model.load_state_dict({name: torch.from_numpy(self._tensor(name)) for name in model.state_dict()})
        return model

    def _tensor(self, name: str) -> np.ndarray:
        """A tensor of its own; it stacks the experts of a layer, gate above up."""
        layer, dot, stacked = name.partition(".experts.")
        if not dot:
            return self._source.array(name)
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[stacked]
        experts = [
            np.concatenate([self._source.array(f"{layer}.experts.{e}.{part}.weight") for part in parts])
            for e in range(self._config.n_routed_experts)
        ]
        return np.stack(experts)
