"""toolkit-lm: LLM inference and serving built as a plugin framework.

The public names are imported on first use. Importing this package imports no torch and looks for no
plugin.
"""

import sys
from importlib import metadata

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
_own, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Public names of core, and those that distributions add by their entry points: `EngineArgs =
    "package:EngineArgs"` in "toolkit_lm.names". Type checkers know only core's names."""
    try:
        return _own(name)
    except AttributeError:
        for found in metadata.entry_points(group="toolkit_lm.names", name=name):
            return found.load()
        from toolkit_lm.plugin.shipped import way_to_get

        if name.startswith("_") or not (way := way_to_get("name", name)):
            raise
        # For an AttributeError, `from toolkit_lm import ...` would show its own message in place of
        # this one.
        imports = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise (ImportError if imports else AttributeError)(
            f"cannot import {name!r} from 'toolkit_lm'. {way}"
        ) from None


def __dir__() -> list[str]:
    return sorted({*__all__, *metadata.entry_points(group="toolkit_lm.names").names})
