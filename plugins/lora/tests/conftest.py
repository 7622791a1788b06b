"""Models and adapters of the tests, made once."""

from __future__ import annotations

from typing import Any

import pytest
from lora_adapters import FORMS, Adapters


@pytest.fixture(scope="session")
def make_adapters(tmp_path_factory: Any) -> Any:
    """A function (family) -> Adapters, with all forms of the family."""
    made: dict[str, Adapters] = {}

    def make(family: str) -> Adapters:
        if family not in made:
            made[family] = Adapters(tmp_path_factory.mktemp(family), family, FORMS[family])
        return made[family]

    return make
