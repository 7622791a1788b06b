"""An ArgumentParser as vLLM's scripts use it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Flags may be written with underscores in place of dashes."""

    # mypy: three overloads say what it returns.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Implements argparse's method of this name."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word
