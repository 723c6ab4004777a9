"""A connection to Ray, on this machine or another."""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from saddlefree.lab.errors import UserError
from saddlefree.lab.plan import cores


@contextmanager
def connected(address: str | None, threads: int) -> Iterator[None]:
    """A connection to Ray, which ends with it; without an address, Ray itself does too."""
    limit = {"env_vars": {"NPROC": str(threads)}}  # of XLA's threads, for others run beside a trial
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": limit}
    if address is not None:
        _probe(address)
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "3")  # what answers may not be Ray: it tries for 20 s
    try:
        if address is None:
            ray.init(address="local", num_cpus=cores(), include_dashboard=False, **quiet)
        else:
            with _silent():
                ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).splitlines()[0]
        if address is None:
            raise UserError(f"Ray cannot be started ({reason})") from error
        raise _unreachable(address, reason) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps off the screen what Ray's own library writes to the file descriptor of stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _probe(address: str, patience: float = 3.0) -> None:
    """Connects to a cluster's port once: Ray itself tries for a minute."""
    place = address.removeprefix("ray://")
    if place in ("auto", "local"):
        return
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"address must be HOST:PORT such as 127.0.0.1:6379, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), patience).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from error


def _unreachable(address: str, reason: str) -> UserError:
    hint = "is it running, and is RAY_AUTH_MODE here what it is there?"
    return UserError(f"Ray cannot be reached at {address} ({reason}): {hint}")
