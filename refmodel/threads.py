"""Independent pieces of work on several threads of this process.

NumPy lets go of the interpreter while it computes, so that pieces run side by side if BLAS has one thread itself. A
piece writes its own part of a result and reads nothing that another writes: the number of threads changes no bit.
"""

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

from refmodel.memory import keep_freed_memory

VARIABLE = "REFMODEL_THREADS"
#: rough seconds of a processor for one multiply-add of a product, and for one number of anything else
MULTIPLY_ADD, NUMBER = 1e-11, 1e-9
# seconds of work below which threads cost more than they save: the interpreter is handed over at every operation
_WORTH = 1e-3

_inside: ContextVar[bool] = ContextVar("inside a piece of work", default=False)


def thread_count() -> int:
    """How many threads work at a time: the variable REFMODEL_THREADS, or 1.

    Raises ValueError for anything but a whole number from 1.
    """
    text = os.environ.get(VARIABLE, "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{VARIABLE} = {text!r}: must be a whole number from 1")
    return int(text)


def each(work: Callable, items: Iterable, seconds: float):
    """`work(item)` for every item, in any order and side by side; what it returns is dropped.

    seconds: what all items take together on one thread, roughly. Work within work is done in order. The first
    exception ends it: items that no thread has begun are left, and it is raised when the others are done.
    """
    waiting, threads = items, 1
    if seconds >= _WORTH and not _inside.get():
        waiting = deque(items)
        threads = min(thread_count(), len(waiting))
    if threads < 2:
        for item in waiting:
            work(item)
        return

    def take_turns():
        token = _inside.set(True)
        try:
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                work(item)
        except BaseException:
            waiting.clear()
            raise
        finally:
            _inside.reset(token)

    helpers = [_pool(threads - 1).submit(copy_context().run, take_turns) for _ in range(threads - 1)]
    try:
        take_turns()
    finally:
        errors = [helper.exception() for helper in helpers]  # waits for them
    for error in errors:
        if error is not None:
            raise error


def row_pieces(rows: int, size: int) -> list[slice]:
    """All rows, in pieces of `size`, the last one shorter."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@functools.cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    keep_freed_memory()  # giving memory back halts every thread
    return ThreadPoolExecutor(helpers, thread_name_prefix="refmodel")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
