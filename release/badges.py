"""Draws the badges of the README from pyproject.toml, so that they say what is true.

    python release/badges.py

They are SVG files in docs/figures/badges, and a test compares them with the metadata.
"""

import pathlib
import re
import tomllib
from html import escape

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "figures" / "badges"
CHARACTER, MARGIN = 6.6, 12.0  # pixels, for text of 11 pixels


def facts() -> dict[str, str]:
    """What each badge says, by its label."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = {"python": project["requires-python"], "licence": project["license"]}
    said |= dict(re.fullmatch(r"(\w+)(.*)", dependency).groups() for dependency in project["dependencies"])
    spaced = {label: re.sub(r"([<>]=?)", r"\1 ", value.replace(",", ", ")) for label, value in said.items()}
    return {label: value.replace(">=", "≥").replace("<=", "≤") for label, value in spaced.items()}


def badge(label: str, value: str) -> str:
    """An SVG image with the label on the left and the value on the right."""
    left, right = (MARGIN + CHARACTER * len(text) for text in (label, value))
    name = escape(f"{label}: {value}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:.0f}" height="20" role="img" '
        f'aria-label="{name}">'
        f'<title>{name}</title><clipPath id="c"><rect width="{left + right:.0f}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#c)"><rect width="{left:.0f}" height="20" fill="#444"/>'
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" fill="#3f51b5"/></g>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2:.1f}" y="14">{escape(label)}</text>'
        f'<text x="{left + right / 2:.1f}" y="14">{escape(value)}</text></g></svg>\n'
    )


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for label, value in facts().items():
        (FOLDER / f"{label}.svg").write_text(badge(label, value))
