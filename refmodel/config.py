"""What a model of the DeepSeek-V3 family is: the fields of its Hugging Face `config.json`, checked on construction."""

from dataclasses import dataclass, field, fields

SCORING_FUNCS = ("sigmoid", "softmax")
TOPK_METHODS = ("noaux_tc", "group_limited_greedy", "greedy")
TORCH_DTYPES = ("bfloat16", "float16", "float32", "float64")
MAX_INT = 2**31 - 1
MAX_EXPERTS = 200_000  # over all layers; eight times the largest published model has


def _refuse(name: str, value, rule: str):
    large = type(value) is int and value.bit_length() > 64
    text = f"an integer of {value.bit_length()} bits" if large else repr(value)
    raise ValueError(f"config: {name} = {text[:100]}: {rule}")


def _check_ints(owner, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or not minimum <= value <= MAX_INT:
            _refuse(name, value, f"must be an integer >= {minimum}{_limit(value)}")


def _limit(value) -> str:
    return f" and <= {MAX_INT}" if type(value) is int and value > MAX_INT else ""


def _check_number(owner, name: str, above: float, inclusive: bool = False) -> None:
    value = getattr(owner, name)
    if type(value) not in (int, float) or not abs(value) <= MAX_INT:
        _refuse(name, value, f"must be a number within {MAX_INT}")
    if value < above or (value == above and not inclusive):
        _refuse(name, value, f"must be {'>=' if inclusive else '>'} {above}")


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: the `rope_scaling` entry of a config. No entry at all means plain RoPE.

    `mscale` and `mscale_all_dim` are None where the config omits them: implementations read an absent value
    differently from 0 and from 1 (transformers modeling_rope_utils.py; vLLM deepseek_scaling_rope.py).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self):
        _check_number(self, "factor", 1, inclusive=True)
        _check_ints(self, 1, "original_max_position_embeddings")
        _check_number(self, "beta_slow", 0)
        _check_number(self, "beta_fast", 0)
        if self.beta_fast < self.beta_slow:
            _refuse("beta_fast", self.beta_fast, f"must not be below beta_slow = {self.beta_slow}")
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _check_number(self, name, 0, inclusive=True)


@dataclass(frozen=True)
class Quantization:
    """The `quantization_config` entry: how FP8 weights are stored. It describes; the tensors decide.

    `weight_block_size` (out, in) in elements; `scale_fmt` "ue8m0" (scales are powers of two) or None;
    `activation_scheme` "dynamic" (scales from the data) or "static"; `excluded` patterns of modules left unquantised;
    `unsupported` names a scheme that this project does not read, "" if it does.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    fmt: str = "e4m3"
    scale_fmt: str | None = None
    activation_scheme: str = "dynamic"
    quant_method: str = "fp8"
    excluded: tuple[str, ...] = ()
    unsupported: str = ""

    def __post_init__(self):
        size = self.weight_block_size
        if type(size) is not tuple or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
            _refuse("weight_block_size", size, "must be two integers >= 1")
        if self.scale_fmt not in (None, "ue8m0"):
            _refuse("scale_fmt", self.scale_fmt, "must be absent or 'ue8m0'")
        if self.activation_scheme not in ("dynamic", "static"):
            _refuse("activation_scheme", self.activation_scheme, "must be 'dynamic' or 'static'")


@dataclass(frozen=True)
class ModelConfig:
    """One model of the family, under Hugging Face's field names. Widths in elements, counts as they are.

    `q_lora_rank` None means one plain `q_proj`; `rope_scaling` None means plain RoPE; `index_topk` None means dense
    attention. `eos_token_id` is a tuple where a config lists several. `assumed` tells in words what a config file did
    not say and what was taken instead; it takes no part in comparison.
    Raises ValueError naming field, value and rule. Source of the fields: deepseek-ai/DeepSeek-V3 `config.json`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    n_shared_experts: int = 1
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleave: bool = True
    max_position_embeddings: int = 4096
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    torch_dtype: str = "bfloat16"
    model_type: str = "deepseek_v3"
    quantization_config: Quantization | None = None
    index_topk: int | None = None
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    assumed: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self):
        _check_ints(self, 1, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        _check_ints(self, 1, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        _check_ints(self, 1, "intermediate_size", "moe_intermediate_size", "moe_layer_freq", "max_position_embeddings")
        _check_ints(self, 0, "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")
        for name in ("norm_topk_prob", "rope_interleave", "tie_word_embeddings", "attention_bias"):
            if type(getattr(self, name)) is not bool:
                _refuse(name, getattr(self, name), "must be true or false")
        _check_number(self, "rms_norm_eps", 0)
        _check_number(self, "rope_theta", 1)
        _check_number(self, "routed_scaling_factor", 0)
        if self.qk_rope_head_dim % 2:
            _refuse("qk_rope_head_dim", self.qk_rope_head_dim, "must be even: RoPE turns pairs")
        for name in ("q_lora_rank", "index_topk", "index_n_heads", "index_head_dim"):
            if getattr(self, name) is not None:
                _check_ints(self, 1, name)
        if self.first_k_dense_replace > self.num_hidden_layers:
            _refuse("first_k_dense_replace", self.first_k_dense_replace, f"exceeds {self.num_hidden_layers} layers")
        self._check_router()
        self._check_tokens()
        if self.hidden_act != "silu":
            _refuse("hidden_act", self.hidden_act, "only 'silu' (SwiGLU) is computed")
        if type(self.model_type) is not str:
            _refuse("model_type", self.model_type, "must be a string")
        if self.attention_bias:
            _refuse("attention_bias", True, "no member of the family has biases in attention; they are not computed")
        if self.torch_dtype not in TORCH_DTYPES:
            _refuse("torch_dtype", self.torch_dtype, f"must be one of {', '.join(TORCH_DTYPES)}")

    def _check_router(self) -> None:
        _check_ints(self, 1, "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
        if self.scoring_func not in SCORING_FUNCS:
            _refuse("scoring_func", self.scoring_func, f"must be one of {', '.join(SCORING_FUNCS)}")
        if self.topk_method not in TOPK_METHODS:
            _refuse("topk_method", self.topk_method, f"must be one of {', '.join(TOPK_METHODS)}")
        if self.n_routed_experts % self.n_group:
            _refuse("n_group", self.n_group, f"must divide n_routed_experts = {self.n_routed_experts}")
        if self.topk_group > self.n_group:
            _refuse("topk_group", self.topk_group, f"must not exceed n_group = {self.n_group}")
        if self.n_routed_experts * self.num_layers > MAX_EXPERTS:
            _refuse("n_routed_experts", self.n_routed_experts, f"{self.num_layers} layers of it exceed {MAX_EXPERTS}")
        group = self.n_routed_experts // self.n_group
        if self.topk_method == "noaux_tc" and self.n_group > 1 and group < 2:
            _refuse("n_group", self.n_group, "leaves one expert per group; a group's score is the sum of its best two")
        reach = self.n_routed_experts if self.topk_method == "greedy" else self.topk_group * group
        if self.num_experts_per_tok > reach:
            _refuse("num_experts_per_tok", self.num_experts_per_tok, f"only {reach} experts can be chosen from")

    def _check_tokens(self) -> None:
        eos = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        for name, token in [("bos_token_id", self.bos_token_id)] + [("eos_token_id", token) for token in eos]:
            if token is not None and (type(token) is not int or not 0 <= token < self.vocab_size):
                _refuse(name, token, f"must be a token id below vocab_size = {self.vocab_size}")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the part without position, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are one MLP; 0 if there are none."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def num_layers(self) -> int:
        """Layers with the MTP layers, which follow the main model's."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts; MTP layers (index >= num_hidden_layers) always do."""
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def from_pretrained(cls, source) -> "ModelConfig":
        """From a `config.json`, a directory that holds one, or a dict of its content, in any spelling of the family.

        `assumed` of the result lists what was not said and what was taken instead.
        Raises ValueError for missing or contradicting fields, and for what cannot be computed right.
        """
        from refmodel.config_json import read_config

        return read_config(source)

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """A published model by a short name (`refmodel.presets.PRESETS`), or "example", the packaged one."""
        from refmodel.presets import preset

        return preset(name)

    def to_dict(self) -> dict:
        """The content of a `config.json`, in the transformers 4 spelling; `from_pretrained` reads it back as equal."""
        result = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "assumed"}
        result["num_key_value_heads"] = self.num_attention_heads
        if isinstance(self.eos_token_id, tuple):
            result["eos_token_id"] = list(self.eos_token_id)
        for name in ("index_topk", "index_n_heads", "index_head_dim", "quantization_config"):
            if result[name] is None:
                del result[name]
        if self.rope_scaling is not None:
            scaling = {key: value for key, value in vars(self.rope_scaling).items() if value is not None}
            result["rope_scaling"] = {"type": "yarn", **scaling}
        if self.quantization_config is not None:
            stored = self.quantization_config
            result["quantization_config"] = {
                "quant_method": stored.quant_method,
                "fmt": stored.fmt,
                "activation_scheme": stored.activation_scheme,
                "weight_block_size": list(stored.weight_block_size),
                **({"scale_fmt": stored.scale_fmt} if stored.scale_fmt else {}),
                **({"modules_to_not_convert": list(stored.excluded)} if stored.excluded else {}),
            }
        return result
