"""A third party's drafter with layers of its own, by the kit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from toolkit_lm_devkit import DraftModelConformance

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "shadow"))
SHADOW = importlib.import_module("toolkit_lm_shadow")
BY_DAY = {"in chunks", "swapped", "forward", "finish"}


class TestShadow(DraftModelConformance):
    drafter = "shadow"
    plugins = (SHADOW,)

    @classmethod
    def parameters(cls):
        later = pytest.mark.nightly
        return {
            argument: {
                name: value if name in BY_DAY else pytest.param(value, marks=later)
                for name, value in values.items()
            }
            for argument, values in super().parameters().items()
        }

    @classmethod
    def twin_options(cls, checkpoint):
        return {}
