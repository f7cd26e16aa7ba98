"""`refmodel step`: every command from a script, as JSON, and through a pseudo-terminal; bad input ends no session."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from refmodel import Model
from refmodel.presets import EXAMPLE
from refmodel.tensor_file import load_tensors, save_tensors
from scripts.main import main
from scripts.step_registry import COMMANDS
from scripts.step_session import completions

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ("--prompt", "def f(")


def script(tmp_path, lines, *args):
    """(exit code, standard output, standard error) of a session that runs `lines`."""
    path = tmp_path / "commands"
    path.write_text("\n".join(lines) + "\n")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["step", *PROMPT, "--script", str(path), *args])
    return code, out.getvalue(), err.getvalue()


def replies(tmp_path, lines, *args):
    code, out, err = script(tmp_path, lines, "--json", *args)
    assert err == ""
    return code, [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "g.safetensors"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["dump", *PROMPT, "--out", str(path)]) == 0
    return path


def test_a_script_is_a_transcript(tmp_path):
    lines = ["# the beginning", "", "n 2", "s", "where", "quit", "never read"]
    code, out, err = script(tmp_path, lines)
    assert (code, err) == (0, "")
    assert out.splitlines()[:4] == [
        "(step) # the beginning",
        "(step) n 2",
        "ran layers.0.attn_proj: norm, q_a, q_a_norm, q, kv_a, kv_latent, k_pe",
        "next: layers.0.attn_core (2 done)",
    ]
    assert re.search(r"\[1 of 5\] layers\.0\.attn_core\.heads  bfloat16 \[6, \d+, \d+\]  min ", out)
    assert "inside layers.0.attn_core: tensor 1 of 5, layers.0.attn_core.heads" in out
    assert "pass: prefill, main model, 1 requests, 6 token rows, prefill attention" in out
    assert "never read" not in out


def test_moves_as_json(tmp_path):
    lines = [
        "next 3",
        "step 2",
        "back",
        "c layer 1",
        "c *.topk_idx",
        "c stage merge",
        "c rank 0",
        "restart",
        "list",
        "c",
    ]
    code, got = replies(tmp_path, lines)
    assert code == 0
    assert [reply["command"] for reply in got] == [
        *("next", "step", "back", "continue", "continue", "continue", "continue", "restart", "list", "continue")
    ]
    assert [ran["name"] for ran in got[0]["ran"]] == ["embed", "layers.0.attn_proj", "layers.0.attn_core"]
    assert got[0]["ran"][0]["tensors"] == ["embed.hidden"]
    assert (got[1]["inside"], got[1]["operation"]["stage"]) == ("layers.0.mlp.up", "mlp")
    assert (got[2]["done"], got[2]["next"]["name"], got[2]["inside"]) == (3, "layers.0.mlp", None)
    assert got[3]["next"]["name"] == "layers.1.attn_proj"
    assert got[4]["tensor"] == "layers.1.attn_core.router.topk_idx"
    assert got[5]["next"] == {"name": "layers.1.merge", "stage": "merge", "layer": 1, "rank": 0, "micro_batch": 0}
    assert got[6]["reason"] == "end"
    assert got[7]["done"] == 0
    assert (got[8]["past"], got[8]["next"]["name"]) == ([], "embed")
    assert (got[9]["reason"], got[9]["next"]) == ("end", None)


def test_looks_as_json(tmp_path):
    lines = [
        "c layers.1.attn_core.norm",
        "show norm",
        "show layers.1.attn_core.norm[2, :3]",
        "hist norm[0] 4",
        "names *.norm",
    ]
    lines += [
        "made",
        "values",
        "show values.hidden[0, 0]",
        "show cache.0.1[1]",
        "show layers.0.attn_proj.q[-1, 0, 0]",
        "help n",
    ]
    code, got = replies(tmp_path, lines)
    assert code == 0
    model = Model.from_pretrained(EXAMPLE)
    from refmodel import record

    with record() as tensors:
        model.forward(list(b"def f("))
    norm = tensors["layers.1.attn_core.norm"].astype(np.float64)
    assert got[1]["shape"] == [6, 256]
    assert got[1]["dtype"] == "bfloat16"
    assert got[1]["statistics"]["max"] == norm.max()
    assert sum(got[1]["histogram"]["counts"]) == norm.size
    assert got[2]["values"] == norm[2, :3].tolist()
    assert len(got[3]["counts"]) == 4
    assert sum(got[3]["counts"]) == 256
    assert "layers.1.attn_core.norm" in got[4]["tensors"]
    assert all(name.endswith(".norm") for name in got[4]["tensors"])
    assert got[5]["tensors"][-1] == "layers.1.attn_core.norm"
    assert "hidden" in got[6]["values"]
    assert got[8]["values"] == np.concatenate(
        [tensors["layers.1.attn_proj.kv_latent"][1], tensors["layers.1.attn_proj.k_pe"][1]]
    ).astype(float).tolist()  # fmt: skip
    assert got[9]["values"] == float(tensors["layers.0.attn_proj.q"][-1, 0, 0])
    assert got[10]["help"].startswith("usage: next [COUNT]  (short: n)\n\nRun the next operation")


def test_rows_and_ranks(tmp_path):
    args = ("--ranks", "4", "--ranks-per-node", "2", "--dispatch", "normal", "--tokens", "1,2,3", "--tokens", "4")
    lines = [
        "mailbox",
        "ledger",
        "c stage combine_send layer 1 rank 3",
        "mailbox",
        "ledger",
        "ledger matrix",
        "ledger layer 2",
    ]
    lines += [
        "c",
        "who request 0 token 2 layer 1",
        "who r0[1] layer 1",
        "who layers.1.experts.out[9]",
        "who embed.hidden[7]",
    ]
    code, out, err = script(tmp_path, lines, *args)
    assert (code, err) == (0, "")
    assert "nothing is under way" in out
    assert "nothing was sent so far" in out
    assert re.search(r"layer 1, message \w+.* rows in \d+ packets from ranks ", out)
    assert re.search(r"dispatch +rdma +[\d,]+ bytes: payload [\d,]+, scales", out)
    assert "token 2 of request 0 (id 102), of rank 0, in layer 1:" in out
    assert re.search(r"slot 7: expert \d+, weight [\d.]+: row \d+ of rank \d, its expert \d+, pair \d+", out)
    assert "row 1 of rank 0 (layer 1, micro-batch 0) is token" in out
    assert "layers.1.experts.out[9] is token 1 of request 0 (id 101), of rank 0" in out
    assert "embed.hidden[7] is token 1 of request 1 (id 2), of rank 1" in out
    code, got = replies(tmp_path, lines, *args)
    assert code == 0
    assert np.sum(got[6]["matrix_bytes"]) == 0  # layer 2 has not begun
    assert np.sum(got[5]["matrix_bytes"]) == sum(
        count for links in got[4]["bytes"].values() for classes in links.values() for count in classes.values()
    )
    assert [origin["token"] for origin in got[8]["origins"]] == [2] * 8
    assert got[8]["origins"][0]["hops"][0]["src"] == 0


def test_goldens(tmp_path, golden):
    code, out, err = script(tmp_path, ["c diff", "restart", "n", "diff", "diff embed.hidden"], "--golden", str(golden))
    assert (code, err) == (0, "")
    assert "no difference: 78 tensors (or ranks' parts of them) compared" in out
    assert "embed.hidden: identical" in out
    tensors = load_tensors(golden)
    wrong = tensors["layers.1.attn_core.norm"].copy()
    wrong[3, 5] += 8
    other = tmp_path / "wrong.safetensors"
    save_tensors(other, {**tensors, "layers.1.attn_core.norm": wrong})
    lines = [f"golden {other}", "c diff", "diff norm", "c diff exact", "diff final.logits"]
    code, out, err = script(tmp_path, lines)
    assert (code, err) == (1, "")
    assert "first difference: layers.1.attn_core.norm" in out
    assert re.search(r"worst absolute [78][.\d]* at \[3, 5\]: golden", out)
    assert "layers.1.attn_core.norm: differs" in out
    code, got = replies(tmp_path, [f"golden {other}", "c diff rank 1"], "--ranks", "2", "--tokens", "7")
    assert code == 2  # other prompts
    assert "has 6 rows, this run makes 7" in got[0]["error"]
    save_tensors(other, {"x": wrong})
    code, _, err = script(tmp_path, [f"golden {other}", "c diff", "diff x", "restart", "diff"])
    assert code == 2
    assert "has none of the tensors that were made: nothing was compared" in err
    assert "no tensor 'x' so far" in err
    assert "the last operation made no tensors" in err
    code, _, err = script(tmp_path, ["c"], "--golden", str(tmp_path / "none.safetensors"))
    assert code == 2
    assert "none.safetensors: no such file" in err


def test_pdb_reads_from_the_script(tmp_path):
    lines = [
        "c stage merge",
        "pdb",
        "p values['routed'].shape",
        "c",
        "c layers.2.attn_core.out",
        "pdb",
        "p out.shape",
        "q",
        "w",
    ]
    code, out, err = script(tmp_path, lines)
    assert code == 2
    assert "merge()" in out
    assert "(6, 256)" in out
    assert "attn_core()" in out
    assert err == "error: broken off; one is before the operation\n"
    assert "next: layers.2.attn_core" in out.splitlines()[-2]


WRONG = {
    "foo": "no command 'foo' (help lists them)",
    "shwo x": "no command 'shwo'; did you mean 'show'?",
    "res x": "restart takes at most 0 words, got 'x'",
    "ma": "'ma' could be made or mailbox",
    "n x": "next 'x': must be a number like 3",
    "n 0": "next 0: must be at least 1",
    "n 1 2": "next takes at most 1 word, got '1 2'",
    "back": "back: this is the beginning of the run",
    "c layer": "continue layer: which one?",
    "c layer x": "layer 'x': must be a number like 3",
    "c layer 99": "layer 99: this model has layers 0 to 3",
    "c rank 1": "rank 1: this run has ranks 0 to 0",
    "c stage moe": "stage 'moe': must be one of embed",
    "c a b": "continue a b: one tensor at a time",
    "c diff": "there is no golden: start with --golden FILE",
    "diff": "there is no golden",
    "golden": "golden: which file?",
    "golden /nope": "/nope: no such file or folder",
    "show": "show: which tensor?",
    "show nothing": "no tensor 'nothing' so far",
    "show embed.hiden": "no tensor 'embed.hiden' so far; names lists those that were made",
    "show x[": "must be a name",
    "show values.nothing": "no value 'nothing' here",
    "show cache.0": "cache.0: must be cache.REQUEST.LAYER",
    "show cache.9.0": "cache.9.0: this pass has requests 0",
    "hist": "hist: which tensor?",
    "who": "must be like r3[17]",
    "who r0[0]": "rank 0 has received no rows so far",
    "who r9[0]": "rank 9: this run has ranks 0 to 0",
    "who request 0 token 0": "was not routed in any layer so far",
    "mailbox": "mailbox: one model alone sends nothing; start with --ranks N",
    "ledger": "ledger: one model alone sends nothing",
    "source": "source: which file?",
    "source /nope": "No such file",
    "help foo": "no command 'foo'",
}


def test_wrong_commands_are_one_line_each_and_the_session_goes_on(tmp_path):
    code, out, err = script(tmp_path, [*WRONG, "n", "w"])
    assert code == 2
    lines = err.splitlines()
    assert len(lines) == len(WRONG)
    for line, (command, words) in zip(lines, WRONG.items()):
        assert line.startswith("error: "), command
        assert words in line, command
    assert "next: layers.0.attn_proj (1 done)" in out
    code, got = replies(tmp_path, list(WRONG))
    assert all("error" in reply for reply in got)


def test_an_operation_that_fails_in_any_way_is_one_line(tmp_path, monkeypatch):
    def broken(*args):
        raise TypeError("two\nlines")

    monkeypatch.setattr("refmodel.layer.attend_batch", broken)
    code, out, err = script(tmp_path, ["c", "w", "n", "l", "show embed.hidden[0, 0]"])
    assert code == 2
    assert err == "error: TypeError: two lines\n" * 2
    assert "next: layers.0.attn_core (2 done)" in out


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupts_while_something_runs(tmp_path, monkeypatch, presses):
    from refmodel import layer

    add, pressed = layer.add_branch, []

    def pressing(*args):
        for _ in range(presses - len(pressed)):
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return add(*args)

    monkeypatch.setattr("refmodel.layer.add_branch", pressing)
    code, out, err = script(tmp_path, ["c", "w", "c", "w"])
    if presses == 1:  # after the operation that runs
        assert (code, err) == (0, "")
        assert "interrupted\nnext: layers.0.mlp (3 done)" in out
    else:  # broken off
        assert (code, err) == (2, "error: interrupted\n")
        assert "next: layers.0.attn_core (2 done)" in out
    assert "at the end: 27 operations ran" in out


def test_source_and_quit(tmp_path):
    inner = tmp_path / "inner"
    inner.write_text("n\nfoo\nshow embed.hidden[0, :2]\n")
    code, out, err = script(tmp_path, [f"source {inner}", "w"])
    assert (code, len(err.splitlines())) == (2, 1)
    assert "embed.hidden[0, :2]  bfloat16 [2]" in out
    assert "next: layers.0.attn_proj (1 done)" in out
    inner.write_text("n\nq\nn\n")
    code, out, _ = script(tmp_path, [f"source {inner}", "w"])
    assert code == 0
    assert out.count("(step) ") == 3


def test_bad_arguments(capsys, tmp_path):
    for args, words in [
        (["--new-tokens", "-1"], "--new-tokens -1"),
        (["--ranks", "3"], "256 physical experts do not divide over 3 ranks"),
        (["--ranks", "0"], "num_ranks = 0"),
        (["--script", str(tmp_path / "none")], "No such file"),
        (["--ranks", "2", "--order", "fast"], "order = 'fast'"),
        (["--tokens", "a"], "--tokens 'a'"),
        (["--checkpoint", str(tmp_path)], "no .safetensors file"),
    ]:
        assert main(["step", *PROMPT, *args]) == 2, args
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert words in error


def test_generation_with_drafts(tmp_path):
    lines = ["c step 1", "w", "c layer 3", "w", "c step.1.final.logits", "c"]
    code, got = replies(
        tmp_path, lines, "--new-tokens", "6", "--drafts", "1", "--ranks", "2", "--schedule", "decode_overlap"
    )
    assert code == 0
    assert (got[1]["pass"], got[1]["mtp"], got[1]["phase"]) == ("step.1", False, "decode")
    assert (got[3]["mtp"], got[3]["next"]["stage"]) == (True, "mtp_embed")
    assert got[5]["reason"] == "end"


def test_completion():
    from refmodel.stepper import Stepper

    run = Stepper(Model.from_pretrained(EXAMPLE), [list(b"ab")])
    assert completions(run, [], "n") == ["names ", "next "]
    assert completions(run, ["show"], "emb") == []
    run.next()
    assert completions(run, ["show"], "emb") == ["embed.hidden"]
    assert completions(run, ["show"], "val") == ["values.hidden"]
    assert completions(run, ["c"], "di") == ["diff"]
    assert completions(run, ["c", "stage"], "e") == ["embed", "experts"]
    assert completions(run, ["help"], "rest") == ["restart"]
    assert "scripts/step.py" in completions(run, ["source"], str(ROOT / "scripts") + "/step.")[0]
    assert completions(run, ["foo"], "") == []


class Terminal:
    """A session behind a pseudo-terminal."""

    def __init__(self, *args, **environment):
        self.master, slave = pty.openpty()
        variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "TERM": "dumb", **environment}
        command = [sys.executable, "-m", "scripts.main", "step", *PROMPT, *args]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: _take_terminal(slave),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""
        self.expect("(step) ")

    def expect(self, text, timeout=30):
        """Read until `text` has come; what came up to it."""
        until = time.monotonic() + timeout
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, until - time.monotonic()))
            if not ready:
                raise AssertionError(f"{text!r} did not come; there was {self.seen!r}")
            try:
                data = os.read(self.master, 4096)
            except OSError:  # the other end is closed
                data = b""
            if not data:
                raise AssertionError(f"{text!r} did not come before the end; there was {self.seen!r}")
            self.seen += data.decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def send(self, text):
        os.write(self.master, text.encode())

    def ask(self, line, prompt="(step) "):
        """What a command answers."""
        self.send(line + "\n")
        self.expect("\n")  # the echo
        return self.expect(prompt).replace("\r", "")

    def interrupt(self):
        """Press Ctrl-C until it is heard: while readline takes in what was typed, Python hears it a key later."""
        for key in ["\x03", " "] * 5:
            self.send(key)
            with contextlib.suppress(AssertionError):
                self.expect("interrupted", timeout=3)
                break
        self.expect("(step) ")

    def end(self):
        code = self.process.wait(30)
        os.close(self.master)
        return code


def _take_terminal(slave):
    """Make the pseudo-terminal the one that Ctrl-C of it interrupts."""
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


def test_every_command_in_a_terminal(tmp_path, golden):
    commands = tmp_path / "commands"
    commands.write_text("n\n")
    history = tmp_path / "history"
    terminal = Terminal("--ranks", "2", "--golden", str(golden), REFMODEL_HISTORY=str(history))
    expected = {
        "next": "ran embed, rank 0: hidden",
        "step": "[1 of 7] layers.0.attn_proj.norm",
        "continue layers.1.attn_core.router.topk_idx": "inside layers.1.attn_core, rank 0",
        "back": "next: layers.1.attn_core, rank 0",
        "restart": "next: embed, rank 0 (0 done)",
        "where": "pass: prefill",
        "list": "-> embed, rank 0",
        "next ": "ran embed, rank 0: hidden",
        "names": "embed.hidden  bfloat16 [6, 256]",
        "values": "values.hidden",
        "show embed.hidden[0, :2]": "embed.hidden[0, :2]  bfloat16 [2]",
        "hist embed.hidden 3": "..",
        "made": "embed.hidden  bfloat16 [6, 256] rows 0-5",
        "help": "help COMMAND says more",
        f"golden {golden}": "79 tensors",
        "diff": "embed.hidden: identical",
        "c stage experts": "next: layers.1.experts",
        "who request 0 token 1": "token 1 of request 0 (id 101)",
        "mailbox": "layer 1, message dispatch_send",
        "ledger": "dispatch local",
    }
    for line, words in expected.items():
        assert words in terminal.ask(line), line
    terminal.send(f"source {commands}\n")
    assert "ran layers.1.experts" in terminal.expect(f"{commands}: 1 lines")
    terminal.expect("(step) ")
    assert "next: layers.1.experts" in terminal.ask("b")
    assert "experts()" in terminal.ask("pdb", "(Pdb) ")
    assert "(step)" not in terminal.ask("p pairs.row.shape", "(Pdb) ")
    assert "next: layers.1.combine_send" in terminal.ask("c")
    assert "ran layers.1.combine_send" in terminal.ask("n")
    assert "ran layers.1.combine_forward" in terminal.ask("")  # an empty line repeats
    assert terminal.ask("").startswith("ran ")  # and repeats again
    assert "error: no command 'nonsense'" in terminal.ask("nonsense")
    assert {find_name(line) for line in [*expected, "source", "pdb", "quit"]} == set(COMMANDS)
    terminal.send("quit\n")
    assert terminal.end() == 0
    assert "who request 0 token 1" in history.read_text()


def find_name(line):
    from scripts.step_registry import find

    return find(line.split()[0]).name


def test_completion_and_history_in_a_terminal(tmp_path):
    terminal = Terminal(
        REFMODEL_HISTORY=str(tmp_path / "none" / "history")
    )  # a history that cannot be kept is no error
    terminal.ask("n")
    terminal.send("show emb\t[0, 0]\n")
    terminal.expect("embed.hidden[0, 0]  bfloat16 []")
    terminal.expect("(step) ")
    terminal.send("\x1b[A\n")  # the line before
    terminal.expect("embed.hidden[0, 0]  bfloat16 []")
    terminal.expect("(step) ")
    terminal.send("\x04")
    assert terminal.end() == 0


def test_interrupts_in_a_terminal(tmp_path):
    terminal = Terminal("--ranks", "32", "--new-tokens", "400", REFMODEL_HISTORY=str(tmp_path / "history"))
    terminal.send("half a line")
    terminal.expect("half a line")
    terminal.interrupt()
    for _ in range(2):
        terminal.send("continue\n")
        terminal.expect("\n")
        time.sleep(0.3)
        terminal.interrupt()
        assert "next: " in terminal.ask("w")
    terminal.send("\x04")  # the end of the input
    assert terminal.end() == 0


def test_the_end_of_piped_input_ends_the_session():
    command = [sys.executable, "-m", "scripts.main", "step", *PROMPT]
    done = subprocess.run(command, cwd=ROOT, input="n\nw", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2] == "next: layers.0.attn_proj (1 done)"
    done = subprocess.run(command, cwd=ROOT, input="foo\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: no command 'foo' (help lists them)\n"
