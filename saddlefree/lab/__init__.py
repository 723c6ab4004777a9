"""The laboratory: problems, baselines, resumable runs, comparisons and reports. Needs the extra `saddlefree[lab]`."""


def main() -> None:
    """The command `saddlefree`."""
    try:
        from saddlefree.lab import cli
    except ModuleNotFoundError as error:
        raise SystemExit(f"saddlefree: {error.name} is missing: install the extra, saddlefree[lab]") from None
    cli.main()
