"""Rows of other plugins in `toolkit explain`."""

from __future__ import annotations

import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import hookimpl
from toolkit_lm_cli.explain import table_of
from toolkit_lm_cli.explanation import explain


class Mine:
    name = "mine"

    @hookimpl
    def toolkit_explain(self, config, models):
        if config.max_model_len == 16:
            raise ValueError("too short")
        linear = [module for module in models[0].modules() if hasattr(module, "spec")]
        return {"mine": [f"{len(linear) > 4} on {next(models[0].parameters()).device}"]}


class Other:
    name = "other"

    @hookimpl
    def toolkit_explain(self, options):
        return {"mine": [f"options {options}"]}


class Silent:
    name = "silent"

    @hookimpl
    def toolkit_explain(self):
        return None


def test_toolkit_explain(checkpoint):
    plugins = [Mine(), Other(), Silent()]
    found = explain(VllmConfig.make(model=str(checkpoint)), plugins)
    assert found.of_plugins["mine"] == ["True on meta", "options None"]
    table = table_of(found)
    row = [*table.columns[0].cells].index("mine")
    assert [*table.columns[1].cells][row] == "True on meta\noptions None"
    with pytest.raises(PluginError, match=r"plugin 'mine'.*toolkit_explain.*too short"):
        explain(VllmConfig.make(model=str(checkpoint), max_model_len=16), plugins)
