"""Other engines' tensor names, as rules that turn them into ours.

A rule is a pattern over the engine's name and the names of ours that the tensor holds, side by side along its last
axis: `fused_qkv_a_proj` holds q_a and kv_a, `gate_up_proj` holds gate and up. Widths come from the reference. Where a
name of ours depends on the kind of layer (the residual after an MLP or after a merge), the candidates are tried in
order and the one that the reference has counts. `{prev}` is the layer before: engines that fuse the residual addition
into the next norm show a layer's residual there.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from refmodel.golden.dump import Dump
from refmodel.golden.looks import half_split_order


class Rule(NamedTuple):
    """`pattern` matches the whole name of an engine (without `model.` and `.output`); `parts` are what it holds,
    each a list of candidates."""

    pattern: str
    parts: tuple[tuple[str, ...], ...]


def _rule(pattern: str, *parts: str) -> Rule:
    """Parts as text, candidates separated by a bar."""
    return Rule(pattern, tuple(tuple(part.split("|")) for part in parts))


_LAYER = r"layers\.(?P<L>\d+)\."
_RESIDUAL = "layers.{L}.merge.residual|layers.{L}.mlp.residual"
_BEFORE = "layers.{prev}.merge.residual|layers.{prev}.mlp.residual|embed.hidden"
_FFN = "layers.{L}.merge.moe|layers.{L}.mlp.out"

_COMMON = (
    _rule(r"embed_tokens", "embed.hidden"),
    _rule(_LAYER + r"input_layernorm(\.0)?", "layers.{L}.attn_proj.norm"),
    _rule(_LAYER + r"self_attn\.q_a_proj", "layers.{L}.attn_proj.q_a"),
    _rule(_LAYER + r"self_attn\.q_a_layernorm", "layers.{L}.attn_proj.q_a_norm"),
    _rule(_LAYER + r"self_attn\.kv_a_proj_with_mqa", "layers.{L}.attn_proj.kv_a"),
    _rule(_LAYER + r"self_attn\.kv_a_layernorm", "layers.{L}.attn_proj.kv_latent"),
    _rule(_LAYER + r"self_attn\.o_proj", "layers.{L}.attn_core.out"),
    _rule(_LAYER + r"self_attn", "layers.{L}.attn_core.out"),
    _rule(_LAYER + r"post_attention_layernorm(\.0)?", "layers.{L}.attn_core.norm"),
    _rule(_LAYER + r"mlp\.gate", "layers.{L}.attn_core.router.logits"),
    _rule(_LAYER + r"(mlp\.)?(topk\.)?topk_(ids|idx|indices)", "layers.{L}.attn_core.router.topk_idx"),
    _rule(_LAYER + r"(mlp\.)?(topk\.)?topk_weights", "layers.{L}.attn_core.router.topk_weights"),
    _rule(_LAYER + r"mlp\.gate_proj", "layers.{L}.mlp.gate"),
    _rule(_LAYER + r"mlp\.up_proj", "layers.{L}.mlp.up"),
    _rule(_LAYER + r"mlp\.gate_up_proj", "layers.{L}.mlp.gate", "layers.{L}.mlp.up"),
    _rule(_LAYER + r"mlp\.act_fn", "layers.{L}.mlp.product"),
    _rule(_LAYER + r"mlp\.down_proj", "layers.{L}.mlp.out"),
    _rule(_LAYER + r"mlp\.shared_experts\.gate_proj", "layers.{L}.shared.gate"),
    _rule(_LAYER + r"mlp\.shared_experts\.up_proj", "layers.{L}.shared.up"),
    _rule(_LAYER + r"mlp\.shared_experts\.gate_up_proj", "layers.{L}.shared.gate", "layers.{L}.shared.up"),
    _rule(_LAYER + r"mlp\.shared_experts\.act_fn", "layers.{L}.shared.product"),
    _rule(_LAYER + r"mlp\.shared_experts(\.down_proj)?", "layers.{L}.shared.out"),
    _rule(_LAYER + r"mlp\.experts", "layers.{L}.combine_recv.routed"),
    _rule(_LAYER + r"mlp", _FFN),
    _rule(r"norm(\.0)?", "final.norm"),
    _rule(r"lm_head|logits_processor|logits", "final.logits"),
)
_FUSED = (
    _rule(_LAYER + r"self_attn\.fused_qkv_a_proj(_with_mqa)?", "layers.{L}.attn_proj.q_a", "layers.{L}.attn_proj.kv_a"),
    _rule(_LAYER + r"input_layernorm\.1", _BEFORE),
    _rule(_LAYER + r"post_attention_layernorm\.1", "layers.{L}.attn_core.residual"),
    _rule(r"norm\.1", "layers.{last}.merge.residual|layers.{last}.mlp.residual"),
    _rule(r"layers\.(?P<L>\d+)\.0", _FFN),
    _rule(r"layers\.(?P<L>\d+)\.1", "layers.{L}.attn_core.residual"),
)
TABLES: Mapping[str, tuple[Rule, ...]] = {
    "huggingface": (*_COMMON, _rule(r"layers\.(?P<L>\d+)(\.0)?", _RESIDUAL)),
    "vllm": (*_COMMON, *_FUSED),
    "sglang": (*_COMMON, *_FUSED),
}

_HEAD = re.compile(
    r"^(?P<step>step\.\d+\.)?(?P<rank>rank\.\d+\.)?(layers\.\d+\.(?=model\.))?(non_intrusive__)?(model\.)?"
)
_TAIL = re.compile(r"\.outputs?(?=$|\.\d+$)")


class Found(NamedTuple):
    """Names of ours that one tensor of an engine holds, in the order of its last axis, and its step prefix."""

    names: tuple[str, ...]


def find(name: str, reference, table: tuple[Rule, ...], last: int) -> Found | None:
    """What a tensor called `name` by an engine is called in `reference`; None where no rule or no name fits."""
    head = _HEAD.match(name)
    bare = _TAIL.sub("", name[head.end() :])
    spellings = [bare, bare.removesuffix(".0")]  # a module that returns (output, bias) shows its output as number 0
    for rule, spelling in ((r, b) for b in spellings for r in table):
        match = re.fullmatch(rule.pattern, spelling)
        if match is None:
            continue
        groups = match.groupdict()
        layer = next((int(v) for v in groups.values() if v is not None), 0)
        prefix = head["step"] or ""
        found = []
        for candidates in rule.parts:
            names = [prefix + c.format(L=layer, prev=layer - 1, last=last) for c in candidates]
            found.append(next((n for n in names if n in reference), None))
        if all(n is not None for n in found):
            return Found(tuple(found))
    return None


def _fit(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Without a batch axis of one, and with heads apart, where that gives the reference's shape."""
    if array.shape != shape and array.size == np.prod(shape) and array.shape[-1:] != shape[-1:]:
        return array.reshape(shape) if array.size == 0 or _regroups(array.shape, shape) else array
    while array.ndim > len(shape) and array.shape[0] == 1:
        array = array[0]
    return array


def _regroups(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether the leading (token) axis survives the reshape."""
    a, b = [n for n in a if n != 1], [n for n in b if n != 1]
    return bool(a and b) and a[0] == b[0]


def translate(dump: Dump, reference: Dump, engine: str) -> tuple[Dump, list[str]]:
    """The dump of an engine under our names, fused tensors taken apart, and notes about what was left out.

    Where two tensors of the engine are one of ours, the first in its order counts. Raises ValueError for an unknown
    engine, for a fused tensor whose width is not the sum of its parts, and where no name fits at all.
    """
    if engine not in TABLES:
        raise ValueError(f"names {engine!r}: there are tables for {', '.join(TABLES)}")
    layers = [int(n) for name in reference for n in re.findall(r"(?:^|\.)layers\.(\d+)\.", name)[:1]]
    loaders: dict = {}
    unknown, repeated = [], 0
    for name in dump:
        found = find(name, reference, TABLES[engine], max(layers, default=0))
        if found is None:
            unknown.append(name)
            continue
        start = 0
        for part in found.names:
            width = reference[part].shape[-1]
            piece = (start, start + width) if len(found.names) > 1 else None
            start += width
            if part in loaders:
                repeated += 1
                continue
            loaders[part] = lambda n=name, p=part, c=piece, w=found.names: _load(dump, n, reference, p, c, w)
    if not loaders:
        raise ValueError(
            f"{dump.source}: none of its {len(dump)} names fits the table {engine!r} (one is {unknown[0]!r})"
        )
    notes = [f"names by the table {engine!r}: {len(loaders)} tensors"]
    if unknown:
        notes.append(f"{len(unknown)} names have no counterpart and were left out, the first is {unknown[0]}")
    if repeated:
        notes.append(f"{repeated} tensors repeat another under one of our names and were left out")
    return Dump(loaders, dump.source, [n for n in loaders], dump.metadata), notes


def _load(dump: Dump, name: str, reference: Dump, part: str, piece, whole) -> np.ndarray:
    array, shape = dump[name], reference[part].shape
    if piece is not None:
        total = sum(reference[n].shape[-1] for n in whole)
        if array.shape[-1] != total:
            raise ValueError(
                f"{dump.source}: {name} is {array.shape[-1]} wide; {' + '.join(whole)} are {total}: no fusion"
            )
        array = array[..., piece[0] : piece[1]]
    return _fit(array, shape)


def interleave_rope(dump: Dump, reference: Dump) -> tuple[Dump, list[str]]:
    """A dump whose rotated vectors are in half-split order (Hugging Face's), put into interleaved order.

    `k_pe` as a whole, and the rotated end of each head of `q`. Scores do not change under it, the cache does
    (huggingface/transformers#35926).
    """
    loaders: dict = {}
    changed = []
    for name in dump:
        last = name.rsplit(".", 1)[-1]
        key = name if last == "k_pe" else f"{name.rpartition('.')[0]}.k_pe"
        if last in ("k_pe", "q") and key in reference:
            changed.append(name)
            loaders[name] = lambda n=name, k=key: _interleaved(dump[n], reference[k].shape[-1])
        else:
            loaders[name] = lambda n=name: dump[n]
    note = f"rotated parts of {len(changed)} tensors were taken from half-split to interleaved order"
    return Dump(loaders, dump.source, dump.order, dump.metadata), [note]


def _interleaved(array: np.ndarray, width: int) -> np.ndarray:
    out = array.copy()
    out[..., -width:] = array[..., -width:][..., np.argsort(half_split_order(width))]
    return out
