"""A Griffe extension: examples in docstrings, which begin with `>>>`, become code blocks in the documentation."""

import re
from typing import Any

import griffe

# A run of lines from a prompt to the next empty one, as doctest reads it.
_EXAMPLE = re.compile(r"^(?P<indent>[ ]*)>>> .*(?:\n[ ]*\S.*)*", re.MULTILINE)


def fence(text: str) -> str:
    """`text` with each run of examples between code fences."""
    return _EXAMPLE.sub(lambda run: f"{run['indent']}```pycon\n{run[0]}\n{run['indent']}```", text)


class Doctests(griffe.Extension):
    """Fences the examples of each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute, once."""
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)
