"""The examples run, and show what they claim."""

import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def test_saddle(tmp_path):
    out = tmp_path / "figures" / "saddle.png"
    command = [sys.executable, EXAMPLES / "saddle.py", "--out", out]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    ends = {line[:36].strip(): line.rsplit("(", 1)[1].rstrip(")") for line in result.stdout.splitlines()[1:5]}
    assert ends["Newton"] == "+0.000, +0.000"  # the saddle
    assert ends["Exact saddle-free Newton"] == "+0.000, +1.000"  # a minimum
    assert ends["Series (K = 18, Sablonnière N = 2)"] == "+0.000, +1.000"
    assert out.read_bytes().startswith(b"\x89PNG")
