"""The laboratory: problems, baselines, resumable runs, comparisons and reports. Needs the extra `saddlefree[lab]`.

`problem`, `optimiser` and `Setting` are for a file of one's own, given to the command line as `--plugin FILE`.
"""

import saddlefree.lab.peers  # noqa: F401 (adds to the registry)
from saddlefree.lab.errors import not_installed
from saddlefree.lab.optimisers import optimiser
from saddlefree.lab.problems import problem
from saddlefree.lab.settings import Setting

__all__ = ["Setting", "main", "optimiser", "problem"]


def main() -> None:
    """The command `saddlefree`."""
    try:
        from saddlefree.lab import cli
    except ModuleNotFoundError as error:
        raise SystemExit(f"saddlefree: {not_installed(error.name, 'lab')}") from None
    cli.main()
