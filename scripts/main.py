"""The `refmodel` command: finds the subcommand and turns bad input into exit code 2 and one line."""

import argparse
import importlib
import os
import sys

#: name -> what `refmodel --help` says; the module of the same name (- as _) does it
COMMANDS = {
    "run": "run a checkpoint on emulated ranks and hold it to one rank",
    "info": "say what a checkpoint is, and why it would not load",
    "dump": "write goldens: a model's named tensors, one layer, or FP8 operators",
    "compare": "compare two dumps and name the first tensor that diverges",
    "step": "stop between stages and look at any tensor",
    "volumes": "count the bytes that dispatch and combine move, per link and class",
    "experts": "plan redundant experts from a load table",
    "timeline": "draw an overlap schedule and price it",
    "estimate": "reproduce the published system's figures from their inputs",
    "day": "replay the published day of traffic, or another",
    "bench": "measure speed and memory as ratios in one run",
    "capture": "run another engine on the same tokens and write its tensors under our names",
    "check-engine": "capture an engine and name its first difference",
}


# Two BLAS threads lose more than they win on products of this size, and collapse when the machine is shared. Results
# do not depend on it; a number of threads that the user sets is kept.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def available() -> dict[str, str]:
    """The commands that this installation has."""
    here = os.path.dirname(__file__)
    return {name: text for name, text in COMMANDS.items() if os.path.exists(f"{here}/{name.replace('-', '_')}.py")}


def _overview() -> str:
    lines = ["usage: refmodel COMMAND [--help] ...", "", "commands:"]
    return "\n".join([*lines, *(f"  {name:<13} {text}" for name, text in available().items())])


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is 0 (holds), 1 (differs) or 2 (could not do it)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    name, commands = argv[0], available()
    if name not in commands:
        print(f"refmodel: error: no command {name!r}; there are {', '.join(commands)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"scripts.{name.replace('-', '_')}")
    parser = _Parser(
        prog=f"refmodel {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(argv[1:])
    try:
        from refmodel.memory import keep_freed_memory
        from refmodel.threads import thread_count

        thread_count()  # a wrong number is told before anything runs
        if not any(name.startswith("MALLOC_") for name in os.environ):
            keep_freed_memory()
        return module.run(arguments) or 0
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"refmodel {name}: error: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
