"""The adapters of a model: those of its entry, and those that operators load and unload while it
runs. They outlast an unload of the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from toolkit_lm.errors import ToolkitError

logger = logging.getLogger(__name__)


class Adapters:
    """Adapters of one model, by name."""

    def __init__(self, listed: Mapping[str, str]) -> None:
        """`listed`: folders of the entry's, by name."""
        self._folders = dict(listed)
        """Folders by name, while no engine runs."""
        self._pinned: frozenset[str] = frozenset()
        self._unloaded: frozenset[str] = frozenset()
        """Names that operators have unloaded."""

    def folders(self, engine: Any) -> Mapping[str, str]:
        """Folders by name, as the engine has them. `engine`: an AsyncLLM; None: it is not
        loaded."""
        if (lora := _part(engine)) is None:
            return self._folders
        return {name: known.path for name, known in lora.adapters.items()}

    def remember(self, engine: Any) -> None:
        """Takes in what an engine has that is about to end."""
        if (lora := _part(engine)) is not None:
            self._folders = {name: known.path for name, known in lora.adapters.items()}
            self._pinned = frozenset(name for name, known in lora.adapters.items() if known.pinned)
            self._unloaded = lora.unloaded

    def restore(self, engine: Any) -> None:
        """Has a new engine know what was remembered. Its workers read an adapter for the first
        request. May be called from any thread."""
        if (lora := _part(engine)) is None:
            return
        for name in self._unloaded & lora.adapters.keys():
            lora.unregister(name)
        lora.unloaded |= self._unloaded
        for name, path in self._folders.items():
            known = lora.adapters.get(name)
            if known is None or known.path != path:
                try:
                    lora.add(lora.made(name, path, pinned=name in self._pinned))
                except ToolkitError as error:
                    logger.warning("adapter %r is not loaded again: %s", name, error)


def _part(engine: Any) -> Any:
    """The plugin lora's part of an engine's front. None: the engine has no adapters."""
    return None if engine is None else engine.processor.parts.by_name.get("lora")
