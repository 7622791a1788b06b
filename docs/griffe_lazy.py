"""An extension of griffe for the API reference: packages whose names lazy_loader resolves have those names, too."""

from __future__ import annotations

from typing import Any

import griffe


class LazyNames(griffe.Extension):
    """Exports what an `__init__.pyi` imports, as `__all__` does in other packages: griffe reads the source, and runs none of it."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _export(pkg)


def _export(module: griffe.Module) -> None:
    if "lazy_loader" in module.imports:
        module.exports = [name for name in module.imports if name != "lazy_loader"]
    for submodule in module.modules.values():
        if not submodule.is_alias:
            _export(submodule)
