"""The catalog is read for each name that is not registered, as a service would be asked."""

from __future__ import annotations

from pathlib import Path

from toolkit_lm_lora.resolvers import AdapterResolver


class CatalogResolver(AdapterResolver):
    """Adapters of a catalog."""

    def resolve(self, name: str) -> Path | None:
        lines = Path(self.options.file).read_text(encoding="utf-8").splitlines()
        return dict(self._entry(line) for line in lines).get(name)

    @staticmethod
    def _entry(line: str) -> tuple[str, Path]:
        name, _, folder = line.partition(" ")
        return name, Path(folder)
