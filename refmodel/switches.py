"""Legitimate differences between implementations, each a named switch; `like=` sets an engine's together."""

from dataclasses import dataclass, field
from typing import ClassVar

#: engine -> the switches in which it differs from the default
ENGINES = {
    "hf": {
        "norm_order": "cast_then_multiply",
        "rope_dtype": "activation",
        "k_pe_order": "half_split",
        "silu_dtype": "activation",
    },
    "vllm": {
        "norm_order": "cast_then_multiply",
        "norm_input": "sum",
        "rope_dtype": "activation",
        "silu_dtype": "activation",
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
    "mlx": {
        "norm_order": "cast_then_multiply",
        "rope_dtype": "activation",
        "router_dtype": "activation",
        "router_norm_eps": 0.0,
    },
    "official": {"silu_dtype": "activation", "router_dtype": "activation", "router_norm_eps": 0.0},
}


def _switch(default, means: str):
    return field(default=default, metadata={"means": means})


@dataclass(frozen=True)
class Switches:
    """One choice per difference. The defaults are Hugging Face's values at the vendor's rounding points."""

    inner_norm_eps: float | None = _switch(
        1e-6, "epsilon of q_a_layernorm and kv_a_layernorm; `None` takes `rms_norm_eps`"
    )
    norm_order: str = _switch(
        "multiply_then_cast", "`cast_then_multiply`: a norm rounds before it applies its weight, too"
    )
    norm_input: str = _switch(
        "stored",
        "what a norm behind a residual addition reads: the sum as it is `stored`, or the `sum` before it is rounded",
    )
    rope_dtype: str = _switch(
        "wide", "`activation`: cos, sin, both products and their sum are each rounded to the activation dtype"
    )
    yarn_max_seq_len: int | None = _switch(
        None,
        "runtime length of the vendor's demo, which applies YaRN only where it exceeds the original length; "
        "`None`: as the config says",
    )
    k_pe_order: str = _switch(
        "interleaved",
        "order of the rotated part of q and k: `interleaved` pairs, or `half_split`: all first numbers, all second",
    )
    silu_dtype: str = _switch("wide", "`activation`: silu(gate) is rounded to the activation dtype before it meets up")
    router_dtype: str = _switch("float32", "`activation`: router logits are rounded to the activation dtype")
    router_norm_eps: float = _switch(1e-20, "added to the sum of the selected scores before dividing by it")
    routed_scale_on: str = _switch(
        "weights",
        "where `routed_scaling_factor` is applied: in the `weights`, or on the combined `output`, rounded once more",
    )
    mtp_hidden: str = _switch(
        "post_norm", "hidden state that feeds the MTP layer: `post_norm` or `pre_norm` of the final norm"
    )
    mtp_zero_position_0: bool = _switch(
        False, "whether the embedding that enters the MTP layer at position 0 is zeroed"
    )
    mtp_position_shift: int = _switch(1, "RoPE position of MTP slot i is i + shift; 1 is the token's own position")
    mtp_recycle: str = _switch(
        "post_norm", "what one module recycles when it drafts more than one token: its `post_norm` or `pre_norm` output"
    )

    CHOICES: ClassVar = {
        "norm_order": ("multiply_then_cast", "cast_then_multiply"),
        "norm_input": ("stored", "sum"),
        "rope_dtype": ("wide", "activation"),
        "k_pe_order": ("interleaved", "half_split"),
        "silu_dtype": ("wide", "activation"),
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
