"""What went into the passes of a golden, as the golden states it."""

import re

import numpy as np

from refmodel.golden.bundle import Bundle
from refmodel.golden.replay import Step


def stated_passes(golden: Bundle) -> dict:
    """Keywords for `locate`: token_ids, lengths, phase, mtp_token_ids and steps of a golden of `refmodel dump`.

    `request.N.prompt` are the tokens of the first pass. Where `extra` states `steps` or `mtp`, `request.N.tokens` are
    the chosen ones: number s enters the main model in step s + 1, and the MTP layer in step s.
    Raises ValueError if the golden does not state its prompts, or fewer tokens than its steps need.
    """
    prompts = _requests(golden, "prompt")
    if not prompts:
        raise ValueError("the golden states no prompts (request.N.prompt); locate needs them to replay the model")
    first = {
        "token_ids": np.concatenate(prompts),
        "lengths": tuple(len(row) for row in prompts),
        "phase": golden.extra.get("phase", "prefill"),
    }
    count, mtp = golden.extra.get("steps", 0), golden.extra.get("mtp", False)
    if not count and not mtp:
        return first
    tokens = _requests(golden, "tokens")
    if len(tokens) != len(prompts) or any(len(new) <= count for new in tokens):
        raise ValueError(f"the golden states {count} steps; request.N.tokens must hold {count + 1} for each request")
    if mtp:
        first["mtp_token_ids"] = np.concatenate([np.append(p[1:], new[0]) for p, new in zip(prompts, tokens)])
    chosen = np.array([new[: count + 1] for new in tokens])  # [requests, steps + 1]
    first["steps"] = tuple(
        Step((1,) * len(prompts), chosen[:, s], mtp_token_ids=chosen[:, s + 1] if mtp else None) for s in range(count)
    )
    return first


def _requests(golden: Bundle, what: str) -> list[np.ndarray]:
    names = [name for name in golden.order if re.fullmatch(rf"request\.\d+\.{what}", name)]
    return [np.asarray(golden.tensors[name]) for name in sorted(names, key=lambda n: int(n.split(".")[1]))]
