"""A session of `refmodel step`: reads lines, runs commands, prints replies."""

import atexit
import bdb
import json
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from refmodel.stepper import STAGE_NAMES, Golden
from scripts import step_golden, step_looks, step_moves, step_origins  # noqa: F401 - commands enter themselves
from scripts.compare import plain
from scripts.step_registry import COMMANDS, Quit, Reply, command, find

PROMPT = "(step) "
HISTORY = "REFMODEL_HISTORY"


class Session:
    """Commands from `lines` (an open file) to standard output; a terminal gets a prompt, history and completion."""

    def __init__(self, stepper, lines, json: bool = False, golden: str | None = None):
        self.stepper, self._lines, self._json = stepper, lines, json
        self._terminal = lines is sys.stdin and sys.stdin.isatty()
        self._failed = self._differs = False
        self._repeat = ""
        self.golden: Golden | None = None
        if golden is not None:
            self.load_golden(golden)

    def run(self) -> int:
        """Until `quit` or the end of the lines; the exit code."""
        if self._terminal:
            # whoever starts us with Ctrl-C ignored, as shells do in the background, passes that on
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._start_readline()
            self._say(Reply(["type help for the commands"], {}))
            self.do("where")
        try:
            while True:
                try:
                    line = self._read()
                except KeyboardInterrupt:
                    print("\ninterrupted (quit leaves)")
                    continue
                if line is None:
                    if self._terminal:
                        print()
                    break
                self.do(line)
        except Quit:
            pass
        if self._terminal:
            return 0
        return 2 if self._failed else int(self._differs)

    def do(self, line: str):
        """Run one line. Whatever goes wrong is one line on standard error, and the session goes on."""
        words = line.split("#", 1)[0].split()
        if not words:
            words = self._repeat.split() if self._terminal else []
        if not words:
            return
        try:
            found = find(words[0])
            self._repeat = " ".join(words) if found.name in ("next", "step") else ""
            if found.name not in ("help", "restart", "quit"):
                self.stepper.settle()
            reply = found.run(self, words[1:])
            self._differs |= reply.differs
            self._say(reply, found.name)
        except (Quit, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            self._complain(words[0], "interrupted")
        except bdb.BdbQuit:
            self._complain(words[0], "broken off; one is before the operation")
        except Exception as error:  # an operation can fail in any way, and one wants to look at what came before it
            kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
            self._complain(words[0], kind + " ".join(str(error).split()))

    # What commands use.

    def load_golden(self, path: str):
        """Raises ValueError or OSError for a file that cannot be read or is of other prompts."""
        golden = Golden(path)
        work = self.stepper.works[0]
        tokens = sum(len(item.token_ids) for item in work.items)
        golden.check_rows(tokens, self.stepper.config.num_experts_per_tok, "embed.hidden")
        self.golden, self._golden_path = golden, path

    def golden_check(self, exact: bool = False) -> Golden:
        """The golden as a check that has compared nothing yet."""
        if self.golden is None:
            raise ValueError("there is no golden: start with --golden FILE, or type golden FILE")
        return Golden(self._golden_path, exact)

    @contextmanager
    def watching(self):
        """Gives a function that says whether Ctrl-C was pressed; pressed twice, it raises KeyboardInterrupt."""
        pressed = False

        def handle(number, frame):
            nonlocal pressed
            if pressed:
                raise KeyboardInterrupt
            pressed = True

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield lambda: pressed
        finally:
            signal.signal(signal.SIGINT, before)

    def debugger(self, make):
        """A debugger that reads where this session reads."""
        skip = ["refmodel.program", "refmodel.stepper.*", "scripts.*"]  # stepping out of an operation ends the session
        if self._terminal:
            return make(nosigint=True, skip=skip)
        return make(stdin=self._lines, stdout=sys.stdout, nosigint=True, skip=skip)

    # Input and output.

    def _read(self) -> str | None:
        if self._terminal:
            try:
                return input(PROMPT)
            except EOFError:
                return None
        line = self._lines.readline()
        if not line:
            return None
        self.echo(line)
        return line

    def echo(self, line: str):
        """A transcript shows what was asked."""
        if line.strip() and not self._json:
            print(PROMPT + line.rstrip(), flush=True)

    def _say(self, reply: Reply, name: str | None = None):
        if not self._json:
            print("\n".join(reply.lines), flush=True)
        elif name is not None:
            print(json.dumps(plain({"command": name, **reply.data})), flush=True)

    def _complain(self, word: str, text: str):
        self._failed = True
        if self._json:
            print(json.dumps({"command": word, "error": text}), flush=True)
        else:
            sys.stdout.flush()
            print(f"error: {text}", file=sys.stderr, flush=True)

    def _start_readline(self):
        try:
            import readline
        except ImportError:  # a Python without it still reads lines
            return
        path = Path(os.environ.get(HISTORY, "~/.refmodel_history")).expanduser()
        with suppress(OSError):
            readline.read_history_file(path)
        atexit.register(_save_history, readline, path)
        readline.set_completer_delims(" \t\n[")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")

    def _complete(self, text: str, state: int) -> str | None:
        import readline

        before = readline.get_line_buffer()[: readline.get_begidx()].split()
        found = completions(self.stepper, before, text)
        return found[state] if state < len(found) else None


def completions(stepper, before: list[str], text: str) -> list[str]:
    """What may stand for `text` behind the words `before`."""
    if not before:
        return sorted(name + " " for name in COMMANDS if name.startswith(text))
    try:
        name = find(before[0]).name
    except ValueError:
        return []
    if name == "help":
        words = list(COMMANDS)
    elif name in ("golden", "source"):
        folder = text.rpartition("/")[0]
        here = Path(folder or ("/" if text.startswith("/") else "."))
        words = [f"{folder}/{p.name}" if folder else p.name for p in here.iterdir()] if here.is_dir() else []
    else:
        words = list(stepper.tensors) + [f"values.{key}" for key in stepper.values]
        if name == "continue":
            words += list(step_moves.KEYWORDS)
        if before[-1] == "stage":
            words = list(STAGE_NAMES)
    return sorted(word for word in words if word.startswith(text))


def _save_history(readline, path: Path):
    with suppress(OSError):
        readline.set_history_length(1000)
        readline.write_history_file(path)


@command("source", "", "FILE")
def source(session, words) -> Reply:
    """Run the commands of a file."""
    if len(words) != 1:
        raise ValueError("source: which file?")
    lines = Path(words[0]).read_text(encoding="utf-8").splitlines()
    for line in lines:
        session.echo(line)
        session.do(line)
    return Reply([f"{words[0]}: {len(lines)} lines"], {"file": words[0]})
