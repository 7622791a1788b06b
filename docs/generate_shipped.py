"""Writes core/src/toolkit_lm/plugin/shipped.json: which distribution of this repository brings
what.

usage: python docs/generate_shipped.py
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from toolkit_lm.plugin import CORE_DISTRIBUTION, Plugins, by_hook
from toolkit_lm.plugin.discovery import AUTHOR
from toolkit_lm.plugin.shipped import PARAMETER

FILE = Path(__file__).parents[1] / "core" / "src" / "toolkit_lm" / "plugin" / "shipped.json"


def table() -> dict[str, dict[str, str]]:
    """Distributions that bring each key, by the noun of the registry.

    "name" has those of the package toolkit_lm, "sampling parameter" those of logits processors."""
    found: dict[str, dict[str, str]] = {}
    plugins = Plugins.load()
    for processor in plugins.logits_processors.entries():
        if (
            (distribution := processor.owner.distribution) is not None
            and _is_own(distribution)
            and not processor.for_model
        ):
            found.setdefault(PARAMETER, {}).update(
                dict.fromkeys(processor.params.__struct_fields__, distribution)
            )
    for registry in by_hook(plugins).values():
        for entry in registry.entries():
            # The other one works without the distribution that overrides it.
            entry = entry.replaced or entry
            distribution = entry.owner.distribution
            if (
                distribution is not None
                and distribution != CORE_DISTRIBUTION
                and _is_own(distribution)
            ):
                found.setdefault(registry.noun, {})[entry.key] = distribution
    for name in metadata.entry_points(group="toolkit_lm.names"):
        if name.dist is not None and _is_own(name.dist.name):
            found.setdefault("name", {})[name.name] = name.dist.name
    return {noun: dict(sorted(keys.items())) for noun, keys in sorted(found.items())}


def _is_own(distribution: str) -> bool:
    return AUTHOR in metadata.metadata(distribution).get_all("Author", [])


def text() -> str:
    return json.dumps(table(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
