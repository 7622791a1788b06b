"""Data of the model `tiny-dates`: dates from 1600 to 2199 as written in English, and in ISO 8601.
Imports no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from datetime import date, timedelta

FIRST = date(1600, 1, 1)
LAST = date(2199, 12, 31)
_MONTHS = "January February March April May June July August September October November December"
MONTHS = _MONTHS.split()
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_NUMBERS = _ONES.split()
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_HELD_OUT = 20
"""One in this many dates was kept from training."""


def is_held_out(day: date) -> bool:
    """The model has not seen it in training, in any form."""
    return zlib.crc32(day.isoformat().encode()) % _HELD_OUT == 0


def held_out() -> Iterator[date]:
    """All such dates, in order."""
    for offset in range((LAST - FIRST).days + 1):
        if is_held_out(day := FIRST + timedelta(offset)):
            yield day


def forms(day: date) -> list[str]:
    """The ways to write a date that the model reads."""
    month = MONTHS[day.month - 1]
    ordinal = ordinal_words(day.day)
    year = year_words(day.year)
    short = f"{day.day}{suffix(day.day)}"
    return [
        f"{month} {day.day}, {day.year}",
        f"{day.day} {month} {day.year}",
        f"{short} {month} {day.year}",
        f"{day.day} {month[:3]} {day.year}",
        f"the {ordinal} of {month}, {year}",
        f"the {ordinal} of {month} {day.year}",
        f"{month} the {ordinal}, {year}",
        f"{month} {short}, {year}",
    ]


def suffix(number: int) -> str:
    """Suffix of an ordinal number in digits: "rd" for 3."""
    return "th" if number // 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def words(number: int) -> str:
    """A number below 100: "twenty-three"."""
    tens, ones = divmod(number, 10)
    return (
        _NUMBERS[number]
        if number < len(_NUMBERS)
        else _TENS[tens] + (f"-{_NUMBERS[ones]}" if ones else "")
    )


def ordinal_words(number: int) -> str:
    """An ordinal number below 100: "twenty-third"."""
    head, dash, last = words(number).rpartition("-")
    ending = _ORDINALS.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return head + dash + ending


def year_words(year: int) -> str:
    """A year of four digits: "nineteen oh five", "two thousand nine", "eighteen hundred"."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return "two thousand" + (f" {words(rest)}" if rest else "")
    if not rest:
        return f"{words(century)} hundred"
    return f"{words(century)} " + (f"oh {words(rest)}" if rest < 10 else words(rest))
