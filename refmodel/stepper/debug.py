"""Python's debugger around one operation."""

import sys
from collections.abc import Callable

from refmodel.program import Operation


def traced(debugger, operation: Operation):
    """Run an operation, stopping in its first line. (`runcall` would hide that the person quit.)"""
    run, arguments = operation.stage.run, (operation.state, operation.layer, operation.scope)
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    try:
        run(*arguments)
    finally:
        sys.settrace(None)


def untraced_after(operation: Operation):
    """Run an operation in which a debugger may start; it ends there."""
    try:
        operation.run()
    finally:
        sys.settrace(None)


def break_at(debugger, wanted: str) -> Callable:
    """A recording's hook that starts the debugger where the wanted tensor is named, once."""
    armed = True

    def hook(name, array):
        nonlocal armed
        if armed and name == wanted:
            armed = False
            frame = sys._getframe(1)
            while frame.f_globals.get("__name__") == "refmodel.trace":
                frame = frame.f_back
            debugger.set_trace(frame)

    return hook
