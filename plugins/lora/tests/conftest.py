"""Models and adapters of the tests, made once."""

from __future__ import annotations

import shutil
from pathlib import Path
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


@pytest.fixture(scope="session")
def two_adapters(tmp_path_factory: Any) -> Adapters:
    """The adapters "all" and "rslora" of a Llama."""
    forms = {name: FORMS["llama"][name] for name in ("all", "rslora")}
    return Adapters(tmp_path_factory.mktemp("two"), "llama", forms)


@pytest.fixture
def folder(two_adapters: Adapters, tmp_path: Path) -> Path:
    """A folder with copies of both, for the option `folder`."""
    made = tmp_path / "adapters"
    for name in ("all", "rslora"):
        shutil.copytree(two_adapters.paths[name], made / name)
    return made
