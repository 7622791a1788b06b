"""`toolkit plugins api`: contracts as an author reads them."""

from __future__ import annotations

import ast

import pytest
import torch
from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli.contracts import contract_text, hooks_of, public_classes


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load()


def test_every_contract_is_python_and_has_nothing_of_torch(plugins):
    """Each name is defined, and the text of each class and hook is a stub that Python reads."""
    hooks = dict(hooks_of(plugins))
    classes = dict(public_classes())
    assert {"toolkit_register_parts", "toolkit_register_routes"} <= hooks.keys()
    assert {"Model", "StepPart", "Planner", "AttentionBackend", "Renderer"} <= classes.keys()
    foreign = {"register_buffer", "load_state_dict", "named_modules", "zero_grad", "cuda"}
    assert foreign <= vars(torch.nn.Module).keys()
    for name in (*hooks, *classes):
        tree = ast.parse(contract_text(name, plugins))
        defined = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
        assert not defined & foreign, name


def test_inherited_members_follow_under_their_class(plugins):
    text = contract_text("WindowSpec", plugins)
    assert text.startswith("from toolkit_lm.kv import WindowSpec")
    assert text.index("window: int") < text.index("# Inherited from FullSpec.")
    assert text.index("# Inherited from FullSpec.") < text.index("# Inherited from KVCacheSpec.")
    assert text.count("def page_bytes") == 1


def test_an_unknown_name_is_refused_with_the_nearest(plugins):
    with pytest.raises(PluginError, match=r"no contract is called 'StpPart'. Did you mean"):
        contract_text("StpPart", plugins)


def test_the_command_prints_a_hook(toolkit):
    done = toolkit("plugins", "api", "toolkit_register_parts")
    assert done.code == 0, done.err
    assert done.out.startswith("def toolkit_register_parts(parts: PartRegistry) -> None:")
