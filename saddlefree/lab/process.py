"""What a process does beside computing: it keeps others out of its folder, and does not die of a signal at once."""

import os
import pathlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from saddlefree.lab.errors import UserError


@contextmanager
def alone(folder: pathlib.Path, patience: float = 10.0) -> Iterator[None]:
    """Keeps other processes out of a folder, for as long as this one lives; one that is just ending is waited for."""
    if fcntl is None:
        yield
        return
    handle, begin = os.open(folder, os.O_RDONLY), time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begin > patience:
                    raise UserError(
                        f"{folder} is in use by another process: let it end, or choose another --out"
                    ) from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if caught:  # asked twice: at once, then
            raise KeyboardInterrupt
        caught.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals do not arrive
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
