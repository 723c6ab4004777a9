"""Saddle-free Newton for JAX: (|H| + λI)⁻¹ g from Hessian-vector products alone, as an Optax optimiser."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saddlefree.names import *  # noqa: F403

_REMOVED = {
    "adaptive_step": "adaptive_plane, a rule",
    "fixed_damping": "fixed_rate, a rule with learning rate, momentum and damping",
    "fixed_step": "fixed_rate, a rule with learning rate, momentum and damping",
}


def __getattr__(name: str) -> Any:
    """All public names, loaded with the first of them: the command line has answers that do not need JAX."""
    if name.startswith("_") and name != "__all__":  # what the import system and tools ask every module for
        raise AttributeError(f"module 'saddlefree' has no attribute {name!r}")
    names = importlib.import_module("saddlefree.names")
    globals().update({known: getattr(names, known) for known in names.__all__}, __all__=names.__all__)
    if name in globals():
        return globals()[name]
    hint = f": use saddlefree.{_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module 'saddlefree' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return importlib.import_module("saddlefree.names").__all__
