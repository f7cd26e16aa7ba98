"""Our model held to Hugging Face transformers, tensor by tensor, on random checkpoints and on the example.

Float32 on both sides. Tolerance: 1e-4 of the root mean square of the tensor, and we may not be further from the
float64 result than they are.
"""

import numpy as np
import pytest

REASON = "not installed; tests/peers/run makes an environment that has it"
pytest.importorskip("torch", reason=f"torch is {REASON}")
pytest.importorskip("transformers", reason=f"transformers is {REASON}")
pytest.importorskip("safetensors", reason=f"safetensors is {REASON}")

from checkpoints import SPECS, write_checkpoint  # noqa: E402
from hf_oracle import TOLERANCE, Peer, captured_with_mtp, distance, distances, recorded  # noqa: E402

from refmodel.checkpoint import EXAMPLE  # noqa: E402
from refmodel.model import Model  # noqa: E402
from scripts.engine_cause import locate_capture  # noqa: E402
from scripts.engine_copy import plain_copy  # noqa: E402

LENGTH = 97  # tokens of a prompt: more than one block of 64 keys and than YaRN's original 64 positions
TEXT = b"class Stack:\n\tdef __init__(self, items):\n\t\tself.items = list(items)\n\n\tdef push(self, item):\n\t\tself."
NEW_TOKENS = 64
CHUNKS = [13, 1, 60, 23]


@pytest.fixture(scope="module", params=[*(spec.name for spec in SPECS), "example"])
def peer(request, tmp_path_factory):
    """Each checkpoint once, with a prompt; the example dequantised, on its own kind of text."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "example":
        return Peer(plain_copy(EXAMPLE, folder), list(TEXT[:LENGTH]))
    spec = next(spec for spec in SPECS if spec.name == request.param)
    rng = np.random.default_rng(100 + spec.seed)
    return Peer(write_checkpoint(spec, folder), rng.integers(2, spec.full_config["vocab_size"], LENGTH).tolist())


def check(peer, actual, reference):
    """Every tensor that transformers gave is within tolerance; the message lists the first that are not."""
    found = distances(actual, reference)
    wrong = [f"{name} {value:.3g}" for name, value in found.items() if value > TOLERANCE]
    assert not wrong, f"first {wrong[:4]} of {len(wrong)}, of {len(found)}; {peer.margins()}"


def test_every_tensor_of_a_prefill(peer):
    assert len(peer.theirs) > 10 * peer.hf.config.num_hidden_layers
    check(peer, peer.mine, peer.theirs)


def test_we_are_not_further_from_the_float64_result(peer):
    exact = peer.mine_exact["final.logits"]
    ours, theirs = (np.sqrt(np.square(x["final.logits"] - exact).mean()) for x in (peer.mine, peer.theirs))
    assert ours <= theirs, f"we {ours:.3g}, transformers {theirs:.3g} from float64; {peer.margins()}"


def test_latent_cache(peer):
    """transformers keeps the same 576-like pair, k_pe in the order that the switch `k_pe_order` names."""
    config = peer.ours.config
    cache = peer.ours.new_cache()
    peer.ours.forward(peer.tokens, cache)
    theirs = peer.cache
    latent = config.kv_lora_rank
    for layer in range(config.num_hidden_layers):
        rows = cache.rows(layer)
        keys, values = (getattr(theirs.layers[layer], part)[0, 0].numpy() for part in ("keys", "values"))
        assert distance(rows[:, :latent], keys) < TOLERANCE, (layer, peer.margins())
        assert distance(rows[:, latent:], values) < TOLERANCE, (layer, peer.margins())


def test_chunks(peer):
    """Both in the same chunks: the last chunk's tensors, at positions and keys that the first chunks made."""
    theirs, cache, at = peer.capture_theirs(CHUNKS), peer.ours.new_cache(), 0
    for length in CHUNKS[:-1]:
        peer.ours.forward(peer.tokens[at : at + length], cache)
        at += length
    check(peer, recorded(peer.ours, peer.tokens[at:], cache), theirs)


def test_absorbed_form(peer):
    """The absorbed form, one token and several at a time, gives the logits of transformers' full prefill."""
    cache, rows = peer.ours.new_cache(), []
    start = peer.ours.forward(peer.tokens[:24], cache)
    for at, length in ((24, 1), (25, 2), (27, 40), (67, 1), (68, 29)):
        rows.append(peer.ours.forward(peer.tokens[at : at + length], cache, phase="decode"))
    logits = np.concatenate([start, *rows])
    assert distance(logits, peer.theirs["final.logits"]) < TOLERANCE, peer.margins()


def test_mtp_layer(peer):
    theirs = peer.theirs_mtp()
    mine = peer.mine_mtp(peer.ours, peer.mine)
    check(peer, mine, theirs)
    layer = peer.hf.config.num_hidden_layers
    logits = f"layers.{layer}.final.logits"
    exact = peer.mine_mtp(peer.exact, peer.mine_exact)[logits]
    ours, other = (np.sqrt(np.square(x[logits] - exact).mean()) for x in (mine, theirs))
    assert ours <= other, f"we {ours:.3g}, transformers {other:.3g} from float64"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_operator_holds_on_its_own_inputs(tmp_path, dtype):
    """A fresh capture, each operator replayed on what transformers gave it."""
    folder, tokens = plain_copy(EXAMPLE, tmp_path, dtype=dtype), list(TEXT[:48])
    theirs = captured_with_mtp(folder, tokens, dtype)
    location = locate_capture(Model.from_pretrained(folder, numerics=dtype, like="hf"), tokens, theirs)
    assert location.ok, location.headline
    assert len(location.report.results) == 75
    if dtype == "bfloat16":
        ours = ("norm", ".kv_latent", ".q", ".k_pe", ".residual", ".moe")  # what switches name: but for float32 noise
        differing = {r.name: r.difference.differing for r in location.report.results if r.name.endswith(ours)}
        assert max(differing.values()) <= 8, differing
        unlike = locate_capture(Model.from_pretrained(folder, numerics=dtype), tokens, theirs)
        assert (unlike.first.name, unlike.findings[0].mistake) == ("layers.0.attn_proj.q", "rope_order")


@pytest.mark.parametrize("speculative", [False, True])
def test_greedy_tokens(peer, speculative):
    theirs = peer.greedy(NEW_TOKENS)
    ours = peer.ours.generate(peer.tokens, NEW_TOKENS, speculative=speculative)
    wrong = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    assert wrong is None, f"token {wrong}: we {ours[wrong]}, they {theirs[wrong]}; {peer.gap(theirs[:wrong])}"
