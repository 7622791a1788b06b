"""The page of toolkit_register_parts: its part is one, through the whole engine."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Annotated

import pytest
from toolkit_lm import LLM
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import PartConformance

PAGE = Path(__file__).parents[1] / "docs/hooks/toolkit_register_parts.md"
MODULE = "page_of_parts"


@pytest.fixture(scope="module", autouse=True)
def module():
    made = sys.modules[MODULE] = types.ModuleType(MODULE)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1:]:
        exec(block, made.__dict__)
    yield made
    del sys.modules[MODULE]


class TenantParams(ProcessorParams):
    tenant: Annotated[str | None, param("Whose request it is.", max_length=64)] = None


class Page:
    name = "page"

    @hookimpl
    def toolkit_register_logits_processors(self, processors):
        processors.add("tenant", None, params=TenantParams)

    @hookimpl
    def toolkit_register_parts(self, parts):
        halves = {"request": "Requests", "planner": "Planner", "worker": "Part"}
        parts.add("tenant", **{half: f"{MODULE}:Tenant{name}" for half, name in halves.items()})
        parts.add("steering", worker=f"{MODULE}:SteeringPart")


class TestPage(PartConformance):
    part = "tenant"
    plugins = (Page(),)

    # The page is one module here.
    test_only_the_workers_half_imports_torch = None

    def test_the_planner_hears_what_was_computed(self, checkpoint, module, monkeypatch):
        heard = []
        monkeypatch.setattr(
            module.TenantPlanner,
            "update",
            lambda planner, answer: heard.append(module.msgpack.decode(answer)),
        )
        greedy = {"temperature": 0}
        with LLM(checkpoint, plugins=[Page()], **self.defaults()) as llm:
            asked = [([3, 4, 5], greedy, {"tenant": name}) for name in ("a", "b", "a")]
            strength = module.Strength("model.layers.3", 0.5)
            assert llm.call_workers("steering.steer", strength, answer=int) == [1]
            first, second, third = self.ask(llm, [*asked])
        assert first == second == third
        computed = {name: sum(one.get(name, 0) for one in heard) for name in "ab"}
        # Three tokens of the prompt and seven drawn ones; the eighth is never computed.
        assert computed == {"a": 20, "b": 10}
