"""A whole model on one rank."""

import numpy as np

from refmodel.cache import LatentCache, PagePool
from refmodel.checkpoint import Checkpoint
from refmodel.experts import LocalExchange
from refmodel.generate import Generated, Item, Step, Work, generate
from refmodel.layer import EMBED, FINAL, Stage, stages_of
from refmodel.mtp import MTP_EMBED
from refmodel.numerics import Numerics, Switches
from refmodel.program import Operation, Pass
from refmodel.random_weights import RandomTensors
from refmodel.state import Batch, Segment, State
from refmodel.trace import Scope
from refmodel.weights import Weights


def main_program(config) -> list[tuple[Stage, int | None]]:
    """(stage, layer) of one pass through the main model, in one rank's order."""
    layers = [(stage, layer) for layer in range(config.num_hidden_layers) for stage in stages_of(config, layer)]
    return [(EMBED, None), *layers, (FINAL, None)]


def mtp_program(config) -> list[tuple[Stage, int | None]]:
    """(stage, layer) of one pass through the MTP layer."""
    layer = config.num_hidden_layers
    return [(MTP_EMBED, layer), *((stage, layer) for stage in stages_of(config, layer)), (FINAL, layer)]


def make_batch(items: list[Item], phase: str, position_shift: int = 0) -> Batch:
    """The rows of several requests as one batch; the RoPE position of a row is its cache slot plus the shift."""
    segments, start = [], 0
    for item in items:
        segments.append(Segment(item.cache, item.slot, start, start + len(item.token_ids)))
        start += len(item.token_ids)
    none = [np.zeros(0, np.int64)]
    slots = [np.arange(item.slot, item.slot + len(item.token_ids)) for item in items]
    return Batch(
        token_ids=np.concatenate([item.token_ids for item in items] or none, dtype=np.int64, casting="unsafe"),
        positions=np.concatenate(slots or none) + position_shift,
        segments=tuple(segments),
        phase=phase,
    )


def default_numerics(dtype_of_weights: str) -> str:
    """The preset of a checkpoint's own storage."""
    return dtype_of_weights if dtype_of_weights in ("fp8", "bfloat16", "float64") else "float32"


class Model:
    """Weights, config and numerics. State (caches) is passed in; nothing that a call computes is kept."""

    def __init__(self, source, config, numerics: Numerics, notices=()):
        self.config, self.numerics, self.notices = config, numerics, tuple(notices)
        self.weights = Weights(source, config, numerics)

    @classmethod
    def from_pretrained(cls, path, numerics=None, compute="float64", like=None) -> "Model":
        """Open a Hugging Face checkpoint directory of the V3 family.

        numerics: `float64`, `float32`, `bfloat16`, `fp8`, or None for the checkpoint's own (fp8 where weights are
        FP8). compute: dtype inside operators. like: an engine whose arithmetic is wanted where implementations differ
        (`hf`, the default, `vllm`, `sglang`, `official`).
        Raises ValueError for whatever is wrong with the files, before anything is computed.
        """
        checkpoint = Checkpoint.open(path)
        name = default_numerics(checkpoint.dtype_of_weights) if numerics is None else numerics
        return cls(checkpoint, checkpoint.config, _numerics(name, compute, like, checkpoint.config), checkpoint.notices)

    @classmethod
    def random(cls, config, seed: int = 0, numerics="float32", compute="float64", like=None) -> "Model":
        """A model with random weights that hide no mistake: norm weights are not 1, biases have both signs."""
        return cls(RandomTensors(config, seed), config, _numerics(numerics, compute, like, config))

    def new_pool(self, max_pages: int | None = None) -> PagePool:
        """Cache pages for any number of requests of one rank."""
        config = self.config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return PagePool(config.num_layers, width, self.numerics.activation, max_pages)

    def new_cache(self, request: int = 0, pool: PagePool | None = None) -> LatentCache:
        """An empty cache for one request, in `pool`, or with pages of its own."""
        return LatentCache(self.new_pool() if pool is None else pool)

    def forward(self, token_ids, cache: LatentCache | None = None, phase: str = "prefill") -> np.ndarray:
        """Logits [T, vocab] of the next tokens after each of `token_ids` [T], which follow what `cache` holds.

        phase: `prefill` computes attention in the naive form, `decode` in the absorbed one, for any number of tokens.
        Raises ValueError for ids outside the vocabulary.
        """
        cache = self.new_cache() if cache is None else cache
        return self.step([Item(0, self.check_ids(token_ids), cache, cache.length)], phase)[0].logits

    def mtp_logits(self, token_ids, hidden, cache: LatentCache | None = None, phase: str = "prefill", slot: int = 0):
        """Logits [T, vocab] of the MTP layer: row i reads (hidden[i], token_ids[i]) and predicts the token after.

        token_ids [T] are the main model's tokens shifted left by one; hidden [T, D] its state (`Step.hidden`, recorded
        as `final.norm`). slot: cache row of the first pair.
        """
        if self.config.num_nextn_predict_layers < 1:
            raise ValueError("mtp_logits: this model has no MTP layer")
        cache = self.new_cache() if cache is None else cache
        item = Item(0, self.check_ids(token_ids), cache, slot, np.asarray(hidden, self.numerics.activation))
        return self.mtp_step([item], phase)[0].logits

    def generate(self, token_ids, max_new_tokens: int, speculative: bool = False, **settings) -> list[int]:
        """New tokens after one prompt; `settings` as in `refmodel.generate.generate`."""
        return self.generate_batch([token_ids], max_new_tokens, speculative=speculative, **settings).tokens[0]

    def generate_batch(self, prompts, max_new_tokens: int, **settings) -> Generated:
        """New tokens after several prompts, with the caches and the count of accepted drafts."""
        return generate(self, [self.check_ids(prompt) for prompt in prompts], max_new_tokens, **settings)

    def step(self, items: list[Item], phase: str, prefix: str = "", last_only: bool = False) -> list[Step]:
        """One pass of the main model over the tokens of several requests; their caches grow.

        last_only: logits [1, vocab] of each request's last token alone, which is all that sampling needs.
        """
        return self.begin(Work(items, phase, prefix, last_only=last_only)).run()

    def mtp_step(self, items: list[Item], phase: str, prefix: str = "") -> list[Step]:
        """One pass of the MTP layer over (hidden, token) pairs of several requests."""
        return self.begin(Work(items, phase, prefix, mtp=True)).run()

    def fresh(self) -> "Model":
        """The engine as if nothing had run on it: a model keeps nothing, so itself."""
        return self

    def begin(self, work: Work) -> Pass:
        """A pass of which nothing has run yet."""
        items, mtp = work.items, work.mtp
        program = mtp_program(self.config) if mtp else main_program(self.config)
        values = {"mtp_input": np.concatenate([item.hidden for item in items])} if mtp else {}
        if work.last_only:
            values["head_rows"] = np.cumsum([len(item.token_ids) for item in items]) - 1
        batch = make_batch(items, work.phase, self.numerics.switches.mtp_position_shift if mtp else 0)
        state = State(self.weights, batch, lambda layer: self._exchange(items, layer), Scope(work.prefix), values)
        operations = (Operation(stage, layer, state) for stage, layer in program)
        return Pass(work, operations, lambda: finish(work, state.values))

    def _exchange(self, items, layer):
        """How rows reach their experts: here they stay where they are."""
        return LocalExchange(self.numerics)

    def check_ids(self, token_ids) -> np.ndarray:
        """Token ids as int64 [T]. Raises ValueError for another shape or an id outside the vocabulary."""
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"token_ids must be a flat list of integers, got {ids.dtype} {ids.shape}")
        bad = np.flatnonzero((ids < 0) | (ids >= self.config.vocab_size))
        if bad.size:
            where = int(bad[0])
            raise ValueError(
                f"token id {int(ids[where])} at position {where} is outside the vocabulary of {self.config.vocab_size}"
            )
        return ids.astype(np.int64)


def finish(work: Work, values: dict) -> list[Step]:
    """The rows of each item of a pass that is over."""
    advance_caches(work)
    return split_steps(work.items, values)


def advance_caches(work: Work):
    """After a pass of the main model the caches have its tokens."""
    if not work.mtp:
        for item in work.items:
            item.cache.length = item.slot + len(item.token_ids)


def split_steps(items: list[Item], values: dict) -> list[Step]:
    """The rows of each item; one row of logits each where the head read last rows only."""
    steps, start = [], 0
    for number, item in enumerate(items):
        rows = slice(start, start + len(item.token_ids))
        logits = values["logits"][number : number + 1] if "head_rows" in values else values["logits"][rows]
        steps.append(Step(logits, values["mtp_hidden"][rows]))
        start = rows.stop
    return steps


def _numerics(name, compute, like, config):
    stored = config.quantization_config
    scale_format = "ue8m0" if stored is not None and stored.scale_fmt == "ue8m0" else "float32"
    return Numerics(name, np.dtype(compute), scale_format=scale_format, switches=Switches.like(like))
