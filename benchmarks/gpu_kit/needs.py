"""Requirements of our distributions that a machine lacks, with the distributions that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = (
    "toolkit-lm[cuda,compile]",
    "toolkit-lm-media[audio]",
    "toolkit-lm-xformers",
    "hypothesis",
    "pytest-timeout",
    "pytest-xdist",
)
"""Distributions that the kit runs."""
OURS = "toolkit-lm"
MUST = ("toolkit-lm-core",)
"""Without what this one needs, nothing runs."""


class Found(NamedTuple):
    """A distribution that is there."""

    version: str | None
    """None: of a version that nobody has written down, and that is taken to do."""
    requires: tuple[str, ...] = ()
    """Its requirements that are looked at, too."""


Find = Callable[[str], Found | None]
"""Finds a distribution by its canonical name; None: it is not there."""


class Lack(NamedTuple):
    requirement: Requirement
    needed_by: str
    found: str | None
    """The version that is there, and does not do."""

    def __str__(self) -> str:
        there = "" if self.found is None else f", and {self.found} is there"
        return (
            f"{self.requirement.name}{self.requirement.specifier} is missing, which "
            f"{self.needed_by} needs{there}"
        )


def lacking(
    find: Find, roots: Iterable[str] = ROOTS, environment: Mapping[str, str] | None = None
) -> list[Lack]:
    """Missing requirements, each by its name once. `environment`: values of markers, if not this
    machine's."""
    waiting = [(Requirement(root), "the kit") for root in roots]
    seen: set[tuple[str, str]] = set()
    lacks: dict[str, Lack] = {}
    while waiting:
        requirement, needed_by = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        found = find(name)
        if found is None or not _does(requirement, found):
            lacks.setdefault(name, Lack(requirement, needed_by, found.version if found else None))
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                needs = (Requirement(one) for one in found.requires)
                waiting += [(one, name) for one in needs if _holds(one, extra, environment)]
    return list(lacks.values())


def _does(requirement: Requirement, found: Found) -> bool:
    return found.version is None or requirement.specifier.contains(found.version, prereleases=True)


def _holds(requirement: Requirement, extra: str, environment: Mapping[str, str] | None) -> bool:
    """Whether it is one of this extra, or where `extra` is "", one that is always needed."""
    if requirement.marker is None:
        return extra == ""
    given = dict(environment or {})
    if extra and requirement.marker.evaluate({**given, "extra": ""}):
        return False
    return requirement.marker.evaluate({**given, "extra": extra})


def find_here(name: str, looked_into: Path | None = None) -> Found | None:
    """Finds a distribution that this Python can import. Requirements are those of our
    distributions, and of all below `looked_into`."""
    try:
        there = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    is_carried = looked_into is not None and Path(str(there.locate_file(""))) == looked_into
    asks = is_carried or canonicalize_name(name).startswith(OURS)
    return Found(there.version, tuple(there.requires or ()) if asks else ())
