"""Legitimate differences between implementations, each a named switch; `like=` sets an engine's together."""

from dataclasses import dataclass
from typing import ClassVar

#: engine -> the switches in which it differs from the default
ENGINES = {
    "hf": {"norm_order": "cast_then_multiply", "rope_dtype": "activation", "k_pe_order": "half_split"},
    "vllm": {
        "norm_order": "cast_then_multiply",
        "norm_input": "sum",
        "rope_dtype": "activation",
        "router_dtype": "activation",
        "router_norm_eps": 0.0,
        "routed_scale_on": "output",
        "inner_norm_eps": None,
        "mtp_zero_position_0": True,
        "mtp_position_shift": 0,
    },
    "sglang": {
        "norm_order": "cast_then_multiply",
        "router_dtype": "activation",
        "router_norm_eps": 0.0,
        "inner_norm_eps": None,
        "mtp_position_shift": 0,
    },
    "mlx": {"router_dtype": "activation", "router_norm_eps": 0.0},
    "official": {"router_dtype": "activation", "router_norm_eps": 0.0},
}


@dataclass(frozen=True)
class Switches:
    """One choice per difference. The defaults are Hugging Face's values at the vendor's rounding points."""

    #: epsilon of q_a_layernorm and kv_a_layernorm; None takes rms_norm_eps (the engines), Hugging Face fixes 1e-6
    inner_norm_eps: float | None = 1e-6
    #: `multiply_then_cast` (vendor), or `cast_then_multiply`: the norm rounds before its weight, too
    norm_order: str = "multiply_then_cast"
    #: what a norm behind a residual addition reads: the sum as it is `stored`, or the `sum` before it is rounded
    norm_input: str = "stored"
    #: `wide`, or `activation`: cos, sin, both products and their sum are each rounded to the activation dtype
    rope_dtype: str = "wide"
    #: order of k_pe in the cache: `interleaved` pairs, or `half_split`, all first numbers before all second ones
    k_pe_order: str = "interleaved"
    #: `float32`, or `activation`: router logits are stored in the activation dtype
    router_dtype: str = "float32"
    #: added to the sum of the selected scores before dividing; the vendor's code and the engines add nothing
    router_norm_eps: float = 1e-20
    #: where routed_scaling_factor is applied: in the `weights`, or on the combined `output`
    routed_scale_on: str = "weights"
    #: hidden state that feeds the MTP layer: `post_norm` or `pre_norm` of the final norm
    mtp_hidden: str = "post_norm"
    #: vLLM zeroes the embedding that enters the MTP layer at position 0
    mtp_zero_position_0: bool = False
    #: RoPE position of MTP slot i is i + shift (1: the token's own position)
    mtp_position_shift: int = 1
    #: what one module recycles when it drafts more than one token: its `post_norm` or `pre_norm` output
    mtp_recycle: str = "post_norm"

    CHOICES: ClassVar = {
        "norm_order": ("multiply_then_cast", "cast_then_multiply"),
        "norm_input": ("stored", "sum"),
        "rope_dtype": ("wide", "activation"),
        "k_pe_order": ("interleaved", "half_split"),
        "router_dtype": ("float32", "activation"),
        "routed_scale_on": ("weights", "output"),
        "mtp_hidden": ("post_norm", "pre_norm"),
        "mtp_recycle": ("post_norm", "pre_norm"),
    }

    def __post_init__(self):
        for name, choices in self.CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"switch {name} = {getattr(self, name)!r}: must be one of {', '.join(choices)}")

    @classmethod
    def like(cls, engine: str | None) -> "Switches":
        """The switches of one engine (`hf`, `vllm`, `sglang`, `mlx`, `official`); None is the default."""
        if engine is None:
            return cls()
        if engine not in ENGINES:
            raise ValueError(f"like = {engine!r}: known engines are {', '.join(sorted(ENGINES))}")
        return cls(**ENGINES[engine])
