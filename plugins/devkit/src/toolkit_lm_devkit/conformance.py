"""Conformance: the base of the kit's test classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

_PARAMETERS: dict[type[Conformance], Mapping[str, Mapping[str, Any]]] = {}
"""The parameters of each class, made once for all of its tests."""


class Conformance:
    """A class of tests that a plugin's tests subclass. Its parameters depend on what the subclass
    names."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        """The values of the arguments that tests of this class take: name -> {id: value}."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        kind = type(self)
        if kind not in _PARAMETERS:
            _PARAMETERS[kind] = kind.parameters()
        for name, values in _PARAMETERS[kind].items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(values.values()), ids=list(values))
