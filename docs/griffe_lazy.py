"""An extension of griffe for the API reference: packages whose names lazy_loader resolves have
those names, too."""

from __future__ import annotations

from typing import Any

import griffe


class LazyNames(griffe.Extension):
    """Exports what an `__init__.pyi` imports from its own package, as `__all__` does elsewhere:
    griffe reads the source, and runs none."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _export(pkg)


def _export(module: griffe.Module) -> None:
    if "lazy_loader" in module.imports:
        module.exports = [
            name for name, target in module.imports.items() if target.startswith(f"{module.path}.")
        ]
    for submodule in module.modules.values():
        if not submodule.is_alias:
            _export(submodule)
