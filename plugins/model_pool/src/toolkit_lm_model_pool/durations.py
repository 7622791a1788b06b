"""Durations as Ollama's clients and operators write them."""

from __future__ import annotations

import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)")


def parse_seconds(value: object) -> float | None:
    """Seconds of a number, or of a text such as "300", "5m" or "1h30m". None for a negative one,
    which stands for ever. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if value >= 0 else None
    if isinstance(value, str) and len(value) <= 64:
        text = value.strip().lower()
        if re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", text):
            return parse_seconds(float(text))
        sign = text.startswith("-")
        parts = _PART.findall(text.removeprefix("-"))
        if parts and "".join(map("".join, parts)) == text.removeprefix("-"):
            return None if sign else sum(float(number) * _UNITS[unit] for number, unit in parts)
    raise ValueError(
        f"{str(value)[:64]!r} is not a duration. Write seconds (300), a text ('5m', '1h30m'), or "
        "-1 for ever."
    )
