"""What a command of `refmodel step` is, and the table of them."""

from collections.abc import Callable
from difflib import get_close_matches
from inspect import cleandoc
from typing import NamedTuple


class Reply(NamedTuple):
    """What a command has to say, to a person and to a machine. `differs`: a tensor differed from the golden."""

    lines: list[str]
    data: dict
    differs: bool = False


class Command(NamedTuple):
    """`run(session, words) -> Reply`; its docstring is its help."""

    name: str
    short: str
    usage: str
    run: Callable

    @property
    def summary(self) -> str:
        """The first line of its help."""
        return self.run.__doc__.splitlines()[0]

    @property
    def help(self) -> str:
        """Usage and the whole help."""
        short = f"  (short: {self.short})" if self.short else ""
        return f"usage: {self.name} {self.usage}".rstrip() + f"{short}\n\n{cleandoc(self.run.__doc__)}"


COMMANDS: dict[str, Command] = {}


class Quit(Exception):
    """The session is over."""


def command(name: str, short: str = "", usage: str = ""):
    """Enter a function in the table."""

    def enter(run):
        COMMANDS[name] = Command(name, short, usage, run)
        return run

    return enter


def find(word: str) -> Command:
    """The command of a name, a short name, or the beginning of one name. Raises ValueError."""
    for each in COMMANDS.values():
        if word in (each.name, each.short):
            return each
    begins = [each for each in COMMANDS.values() if each.name.startswith(word)]
    if len(begins) == 1:
        return begins[0]
    if begins:
        raise ValueError(f"{word!r} could be {' or '.join(each.name for each in begins)}")
    close = get_close_matches(word, COMMANDS, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"no command {word!r}{hint} (help lists them)")


def integer(word: str, what: str) -> int:
    """A word as an integer of 0 or more. Raises ValueError naming `what`."""
    if not word.isdigit():
        raise ValueError(f"{what} {word!r}: must be a number like 3")
    return int(word)


def at_most(words: list[str], count: int, each: str):
    """Raise ValueError where a command got more words than it takes."""
    if len(words) > count:
        raise ValueError(f"{each} takes at most {count} word{'s' * (count != 1)}, got {' '.join(words)!r}")
