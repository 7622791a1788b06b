"""Amounts of memory as users write them."""

from __future__ import annotations

import re

from toolkit_lm.errors import ConfigError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_memory(text: str) -> int | float:
    """An amount of memory: bytes as an int ("2GiB", "512MB", "1073741824"), or a fraction of the
    device as a float ("0.5", "50%").

    Raises ConfigError.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-\d+)?)\s*(%|(?:([kmgt]i?)?b?))\s*", text.lower())
    if match is None:
        raise ConfigError(
            f"{text!r} is not an amount of memory. Write bytes ('2GiB', '500MB', '1073741824') "
            "or a fraction ('0.5', '50%')."
        )
    number, unit, prefix = match.groups()
    if unit == "%" or (unit == "" and set(".e") & set(number)):
        fraction = float(number) / (100 if unit == "%" else 1)
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"{text!r} is not a fraction of memory: it must be above 0 and at most 1 (100%)."
            )
        return fraction
    amount = (
        int(number) * _UNITS[prefix or ""]
        if number.isdigit()
        else int(float(number) * _UNITS[prefix or ""])
    )
    if amount < 1:
        raise ConfigError(f"{text!r} is not an amount of memory: it must be at least one byte.")
    return amount
