"""Generation: prefill, then decode steps, plain or speculative with the MTP layer; greedy or sampled.

Written against an engine (`Model`, or a `Deployment` of many ranks) that computes steps; what is decided about tokens
is decided here, once for both. Each request has its own random generator, seeded by (seed, request), so that placement
on ranks and the company of other requests change nothing.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from refmodel.cache import LatentCache


class Item(NamedTuple):
    """Tokens of one request for one step. `slot` is the cache row of the first one, `hidden` feeds the MTP layer."""

    request: int
    token_ids: np.ndarray  # int64 [t]
    cache: LatentCache
    slot: int
    hidden: np.ndarray | None = None  # [t, D], MTP steps only


class Work(NamedTuple):
    """One pass that an engine is asked for: through the main model, or through the MTP layer."""

    items: list[Item]
    phase: str
    prefix: str = ""  # of the names of its tensors
    mtp: bool = False
    last_only: bool = False  # logits of each request's last token alone, which is all that sampling needs


class Step(NamedTuple):
    """What an engine returns for one item."""

    logits: np.ndarray  # [t, vocab]
    hidden: np.ndarray  # [t, D]: the state that an MTP step takes


class Accepted(NamedTuple):
    tokens: list[int]  # accepted drafts, then one token of the target's own
    num_accepted: int


class Generated(NamedTuple):
    tokens: list[list[int]]  # new tokens per request
    caches: list[LatentCache]
    drafted: int  # drafts that were verified
    accepted: int  # of these
    steps: int  # decode steps, summed over requests

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per draft; NaN without drafts."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decode step yields, the target's own token included."""
        return 1 + self.accepted / self.steps if self.steps else float("nan")


def distribution(logits, temperature: float, top_p: float) -> np.ndarray:
    """Sampling probabilities float64 [..., vocab]: one-hot of the first maximum at temperature 0.

    Otherwise softmax(logits / temperature), restricted to the smallest set of most probable tokens whose sum reaches
    top_p (ties: lower id first), normalised.
    """
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        p = np.zeros(logits.shape)
        np.put_along_axis(p, logits.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
        return p
    p = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    p /= p.sum(axis=-1, keepdims=True)
    if top_p < 1:
        order = np.argsort(-p, axis=-1, kind="stable")
        ranked = np.take_along_axis(p, order, axis=-1)
        before = np.cumsum(ranked, axis=-1) - ranked  # probability of everything ranked higher
        np.put_along_axis(p, order, np.where(before < top_p, ranked, 0.0), axis=-1)
        p /= p.sum(axis=-1, keepdims=True)
    return p


def draw(p, rng) -> int:
    """One token from probabilities [vocab], by one uniform number."""
    return int(min(np.searchsorted(np.cumsum(p), rng.random() * p.sum(), side="right"), np.flatnonzero(p)[-1]))


def accept(draft_tokens, draft_probs, target_probs, rng) -> Accepted:
    """The exact acceptance rule of speculative sampling (arXiv 2211.17192): the output follows the target.

    draft_tokens [k], draft_probs [k, vocab] they were drawn from, target_probs [k + 1, vocab]. Draft j is kept with
    probability min(1, p / q); the first rejected one is replaced by a draw from max(p - q, 0), normalised; if all are
    kept, one more token is drawn from the last target row. Raises ValueError when the shapes do not fit.
    """
    draft_tokens = [int(token) for token in draft_tokens]
    k = len(draft_tokens)
    if len(target_probs) != k + 1 or len(draft_probs) != k:
        raise ValueError(f"accept: {k} drafts need {k} draft rows and {k + 1} target rows")
    for j, token in enumerate(draft_tokens):
        p, q = target_probs[j], draft_probs[j]
        if rng.random() * q[token] < p[token]:
            continue
        left = np.maximum(p - q, 0.0)
        # p <= q everywhere means p == q, where a rejection can only come from rounding: p itself is then exact
        return Accepted([*draft_tokens[:j], draw(left if left.sum() > 0 else p, rng)], j)
    return Accepted([*draft_tokens, draw(target_probs[k], rng)], k)


@dataclass
class _Request:
    index: int
    prompt: np.ndarray
    cache: LatentCache
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    draft_probs: list[np.ndarray] = field(default_factory=list)
    left: int = 0


def generate(engine, prompts, max_new_tokens: int, **settings) -> Generated:
    """Generate up to `max_new_tokens` per prompt (arrays of token ids), all requests in one batch.

    `settings`, their meaning and the errors are those of `passes`.
    """
    walk, steps = passes(engine, prompts, max_new_tokens, **settings), None
    while True:
        try:
            work = walk.send(steps)
        except StopIteration as end:
            return end.value
        compute = engine.mtp_step if work.mtp else engine.step
        steps = compute(work.items, work.phase, work.prefix)


def passes(
    engine,
    prompts,
    max_new_tokens: int,
    *,
    speculative: bool = False,
    num_drafts: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids=(),
) -> Generator[Work, list[Step], Generated]:
    """Generation as a walk: yields the passes that it needs, is sent their steps, and returns what it generated.

    Greedy at temperature 0; then speculative and plain decoding give the same tokens. With `num_drafts` > 1 the one MTP
    layer runs again on its own output. Raises ValueError for empty prompts, settings out of range, or drafts wanted
    from a model without an MTP layer.
    """
    _check(engine, prompts, max_new_tokens, speculative, num_drafts, temperature, top_p)
    loop = _Loop(engine, num_drafts if speculative else 0, temperature, top_p, frozenset(stop_token_ids))
    return (yield from loop.run(prompts, max_new_tokens, seed))


def _check(engine, prompts, max_new_tokens, speculative, num_drafts, temperature, top_p):
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty: generation needs at least one token")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature = {temperature}, top_p = {top_p}: must be >= 0, and in (0, 1]")
    if speculative and num_drafts < 1:
        raise ValueError(f"num_drafts = {num_drafts}: speculative decoding needs at least one")
    if speculative and engine.config.num_nextn_predict_layers < 1:
        raise ValueError("speculative decoding needs an MTP layer, and this model has none")


class _Loop:
    def __init__(self, engine, num_drafts, temperature, top_p, stop):
        self.engine, self.num_drafts, self.stop = engine, num_drafts, stop
        self.distribution = lambda logits: distribution(logits, temperature, top_p)
        self.drafted = self.accepted = self.steps = 0

    def run(self, prompts, max_new_tokens, seed):
        requests = []
        for index, prompt in enumerate(prompts):
            rng = np.random.default_rng([seed, index])
            cache = self.engine.new_cache(index)
            requests.append(_Request(index, np.asarray(prompt, np.int64), cache, rng, left=max_new_tokens))
        yield from self._prefill(requests)
        number = 0
        while active := [request for request in requests if request.left > 0]:
            number += 1
            yield from self._decode(active, f"step.{number}.")
        tokens = [request.tokens for request in requests]
        return Generated(tokens, [r.cache for r in requests], self.drafted, self.accepted, self.steps)

    def _prefill(self, requests):
        items = [Item(r.index, r.prompt, r.cache, 0) for r in requests]
        results = yield Work(items, "prefill")
        for request, result in zip(requests, results):
            self._take(request, [draw(self.distribution(result.logits[-1]), request.rng)])
        shifted = [np.append(r.prompt[1:], r.tokens[-1]) for r in requests]
        hidden = [result.hidden for result in results]
        yield from self._draft(requests, shifted, hidden, [0] * len(requests), "prefill", "")

    def _decode(self, active, prefix):
        """Verify each request's drafts behind its last token; take what is accepted and one token more."""
        items = [Item(r.index, np.array([r.tokens[-1], *r.drafts], np.int64), r.cache, r.cache.length) for r in active]
        results = yield Work(items, "decode", prefix)
        shifted, hidden, slots = [], [], []
        for request, item, result in zip(active, items, results):
            verdict = accept(request.drafts, request.draft_probs, self.distribution(result.logits), request.rng)
            self.drafted += len(request.drafts)
            self.accepted += verdict.num_accepted
            self.steps += 1
            taken = self._take(request, verdict.tokens)
            request.cache.truncate(item.slot + taken)  # rejected drafts leave the cache
            shifted.append(np.array(request.tokens[-taken:], np.int64))
            hidden.append(result.hidden[:taken])
            slots.append(item.slot)
        yield from self._draft(active, shifted, hidden, slots, "decode", prefix)

    def _take(self, request, tokens):
        """Append tokens until the budget or a stop token ends the request; how many were taken."""
        tokens = tokens[: request.left]
        ends = [position for position, token in enumerate(tokens) if token in self.stop]
        if ends:
            tokens = tokens[: ends[0] + 1]
        request.tokens.extend(tokens)
        request.left = 0 if ends else request.left - len(tokens)
        return len(tokens)

    def _draft(self, requests, token_ids, hidden, slots, phase, prefix):
        """Let the MTP layer read the new (h_i, t_(i+1)) pairs, and draft from the last one."""
        for request in requests:
            request.drafts, request.draft_probs = [], []
        work = [
            (request, Item(request.index, ids, request.cache, slot, state))
            for request, ids, state, slot in zip(requests, token_ids, hidden, slots)
            if request.left > 0
        ]
        for draft in range(self.num_drafts):
            if not work:
                return
            name = prefix if draft == 0 else f"{prefix}draft.{draft}."
            results = yield Work([item for _, item in work], phase, name, mtp=True)
            phase, following = "decode", []
            for (request, item), result in zip(work, results):
                p = self.distribution(result.logits[-1])
                token = draw(p, request.rng)
                request.drafts.append(token)
                request.draft_probs.append(p)
                slot = item.slot + len(item.token_ids)
                if draft + 1 < min(self.num_drafts, request.left - 1):  # a draft past the budget is never verified
                    following.append(
                        (request, Item(request.index, np.array([token]), request.cache, slot, result.hidden[-1:]))
                    )
            work = following
