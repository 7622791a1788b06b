"""Leaves variants of families to the night: by day each family has its first."""

import pytest
from hybrid_families import VARIANTS

LATER = {name for variants in VARIANTS.values() for name in list(variants)[1:]}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_hybrid_conformance.py" and any(
            name in item.nodeid.partition("[")[2] for name in LATER
        ):
            item.add_marker("nightly")
