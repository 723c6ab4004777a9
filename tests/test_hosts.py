"""Two processes on loopback train to the parameters of one."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
from hosts_program import train
from test_acceptance import ALL, FEW, PAIRS

CHOSEN = FEW if PAIRS is ALL else [("recycled", "search"), ("over-adam", "fixed")]
PAIRS_OF_HOSTS = [":".join(pair) for pair in CHOSEN]


def test_two_processes_are_as_good_as_one():
    """Batch and parameters are sharded over both; microbatches lie on both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = pathlib.Path(__file__).with_name("hosts_program.py")
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    commands = [[sys.executable, str(program), str(port), str(n), "2", *PAIRS_OF_HOSTS] for n in range(2)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-2000:] + outputs[1][1][-2000:]
    together = json.loads(outputs[0][0].splitlines()[-1])
    for pair in PAIRS_OF_HOSTS:
        np.testing.assert_allclose(together[pair], train(pair, None), atol=1e-4, rtol=1e-4, err_msg=pair)
