"""Speculative decoding in numbers, as vLLM and SGLang report them.

A *draft* is one step's proposal, of `num_draft_tokens` tokens; the accepted ones are a run from its start; a step also
yields one token of the target model itself, the bonus token. Acceptance *rate* is accepted over proposed tokens;
acceptance *length* is tokens per step, bonus included (vllm-project/vllm#48892 mixes the two).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class SpecStats:
    """Counts over the verified drafts of any number of requests; all at most `num_draft_tokens` long.

    accepted_at[i] counts the drafts whose token i was accepted. Raises ValueError for counts that cannot be.
    """

    num_draft_tokens: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens = {self.num_draft_tokens}: a draft proposes at least one token")
        self.accepted_at = self.accepted_at or [0] * self.num_draft_tokens

    def add(self, accepted: int, proposed: int | None = None) -> None:
        """One verified draft of `proposed` tokens (all of them if None), the first `accepted` of which were kept."""
        proposed = self.num_draft_tokens if proposed is None else proposed
        if not 0 <= accepted <= proposed <= self.num_draft_tokens:
            raise ValueError(f"{accepted} accepted of {proposed} proposed; a draft has up to {self.num_draft_tokens}")
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        for i in range(accepted):
            self.accepted_at[i] += 1

    def merge(self, others: Iterable["SpecStats"]) -> "SpecStats":
        """Sum of this and others, e.g. over requests or ranks. Raises ValueError for different draft lengths."""
        total = SpecStats(self.num_draft_tokens)
        for one in (self, *others):
            if one.num_draft_tokens != self.num_draft_tokens:
                raise ValueError(f"drafts of {one.num_draft_tokens} and {self.num_draft_tokens} tokens do not add up")
            total.drafts += one.drafts
            total.draft_tokens += one.draft_tokens
            total.accepted_tokens += one.accepted_tokens
            total.accepted_at = [a + b for a, b in zip(total.accepted_at, one.accepted_at)]
        return total

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over proposed tokens; 0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per step, bonus token included: 1 + accepted per draft; 1 without drafts."""
        return 1.0 + (self.accepted_tokens / self.drafts if self.drafts else 0.0)

    @property
    def rate_at(self) -> list[float]:
        """For each position, the share of drafts whose token there was accepted; never rises."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted_at]


def expected_length(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens per step if each draft token is accepted with this probability, given those before it: sum of p^i, 0..k.

    The published 1.8 tokens per step with one draft token is an acceptance of 0.8. Raises ValueError for p not in 0..1.
    """
    if not 0 <= acceptance <= 1 or num_draft_tokens < 0:
        raise ValueError(f"acceptance {acceptance} is not in 0 .. 1, or {num_draft_tokens=} is negative")
    return sum(acceptance**i for i in range(num_draft_tokens + 1))
