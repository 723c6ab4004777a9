"""A number or a word that a user can set: of an optimiser, or of a problem's variant."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saddlefree.lab.errors import UserError, nearest

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class Setting:
    """Its default, what is allowed, and where tuning looks for it.

    >>> Setting(20, low=1, high=1000, whole=True).allowed
    'a whole number from 1 to 1000'
    """

    default: Any
    search: tuple[float, float] | None = None  # None: tuning leaves the default
    low: float = 0.0
    high: float = math.inf
    log: bool = True  # whether tuning draws its logarithm
    whole: bool = False
    choices: tuple[str, ...] = ()
    about: str = ""

    @property
    def allowed(self) -> str:
        """The range in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = "a whole number" if self.whole else "a finite number"
        if math.isfinite(self.high):
            return f"{kind.replace('finite ', '')} from {_plain(self.low)} to {_plain(self.high)}"
        return f"{kind} ≥ {_plain(self.low)}"

    def parse(self, name: str, text: Any) -> Any:
        """The value that `text` stands for, if it is allowed."""
        try:
            value = text if self.choices else int(text) if self.whole else float(text)
            good = value in self.choices if self.choices else self.low <= value <= self.high and math.isfinite(value)
        except (ValueError, OverflowError):
            good = False
        if not good:
            raise UserError(f"{name} must be {self.allowed}, got {_cut(text)}")
        return value

    def draw(self, rng: "np.random.Generator") -> Any:
        """A random value from the range of the search."""
        assert self.search
        low, high = self.search[0], self.search[1] + self.whole
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        return min(int(value), int(self.search[1])) if self.whole else value


def parsed(settings: Mapping[str, Setting], changes: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Values for the named settings that are changed; `what` completes the message "… is none".

    >>> parsed({"width": Setting(32, whole=True)}, {"width": "64"}, "a variant of digits")
    {'width': 64}
    """
    for name in changes:
        if name not in settings:
            hint = nearest(name, settings, f"there are {', '.join(settings)}" if settings else "there are none")
            raise UserError(f"{name!r} is not {what}: {hint}")
    return {name: settings[name].parse(name, text) for name, text in changes.items()}


def _plain(value: float) -> str:
    """As people write it: 1000000 and not 1e+06."""
    return str(int(value)) if abs(value) < 1e15 and value == int(value) else f"{value:g}"


def _cut(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= 40 else f"{shown[:37]}…"
