"""Errors that a user can cause and mend."""

import difflib
from collections.abc import Iterable, Mapping
from typing import NoReturn, TypeVar

Entry = TypeVar("Entry")


class UserError(Exception):
    """One line: what is wrong, what is allowed, what to do. The command line prints it and exits with 2."""


def not_installed(name: str | None, extra: str) -> UserError:
    """The error for a package of an extra that is missing.

    >>> print(not_installed("jinns", "peers"))
    jinns is missing: pip install '.[peers]' in a checkout of saddlefree installs it
    """
    return UserError(f"{name} is missing: pip install '.[{extra}]' in a checkout of saddlefree installs it")


class Interrupted(Exception):  # noqa: N818 (it is none)
    """A signal ended the work, of which nothing is lost."""

    def __init__(self, number: int, where: str):
        super().__init__(f"interrupted {where}; go on with --resume")
        self.code = 128 + number


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint for a name that is not known: one that is like it, or `otherwise`.

    >>> nearest("adan", ["adam", "sgd"], "there are two")
    'did you mean adam?'
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


class Registry(dict[str, Entry]):
    """What a user can name; `kind` is the word for an entry, `otherwise` the hint where no known name is alike."""

    def __init__(self, kind: str, entries: Mapping[str, Entry] | None = None, otherwise: str = ""):
        super().__init__(entries or {})
        self.kind, self.otherwise = kind, otherwise

    def add(self, name: str, entry: Entry) -> None:
        """Adds an entry, whose name must be new."""
        if name in self:
            raise UserError(f"{self.kind} {name!r} is there already: give yours another name")
        self[name] = entry

    def __missing__(self, name: str) -> NoReturn:
        hint = nearest(name, self, self.otherwise or f"there are {', '.join(self)}")
        raise UserError(f"{self.kind} {name!r} is not known: {hint}")
