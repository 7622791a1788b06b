"""What a plugin's code does wrong is said in its name, wherever the engine meets it: distribution, file and line, cause, chained."""

from __future__ import annotations

import re
import sys
import types

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import PluginWarning, hookimpl
from toolkit_lm_cli.explanation import explain
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_renderer_hf.renderer import HfRenderer
from toolkit_lm_sdpa.backend import SdpaBackend

NAMED = rf"plugin 'failing' \(given from code, {re.escape(__file__)}:\d+\) failed in "
SMALL = {"max_model_len": 64, "num_kv_blocks": 16}


def failing(*names: str) -> dict[str, object]:
    """Methods that raise."""

    def boom(self, *args, **kwargs):
        raise RuntimeError("boom")

    return dict.fromkeys(names, boom)


def backend(*names: str) -> type:
    methods = failing(*names)
    return type("Failing", (SdpaBackend,), {name: classmethod(m) if name in CLASSMETHODS else m for name, m in methods.items()})


CLASSMETHODS = ("refuses", "page_layout")


class Failing:
    """A plugin with one target, under one name."""

    name = "failing"

    def __init__(self, what: str, target: type, key: str = "failing", **fields) -> None:
        self.what, self.key, self.fields = what, key, fields
        sys.modules["failing_target"] = types.SimpleNamespace(target=target)

    def add(self, what: str, registry) -> None:
        if what == self.what:
            registry.add(self.key, "failing_target:target", **self.fields)

    @hookimpl
    def toolkit_register_attention_backends(self, backends):
        self.add("backend", backends)

    @hookimpl
    def toolkit_register_models(self, models):
        self.add("model", models)

    @hookimpl
    def toolkit_register_renderers(self, renderers):
        self.add("renderer", renderers)


@pytest.fixture(autouse=True)
def forget():
    yield
    sys.modules.pop("failing_target", None)


@pytest.mark.parametrize("method", ["page_layout", "__init__", "build", "forward"])
def test_a_backend_that_fails_while_the_engine_starts(method):
    plugin = Failing("backend", backend(method), priority=50)
    with pytest.raises(PluginError, match=NAMED + r".*boom: RuntimeError: boom") as caught:
        LLM("tiny", plugins=[plugin], **SMALL)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_backend_that_cannot_be_asked_is_passed_over():
    plugin = Failing("backend", backend("refuses"), priority=50)
    with pytest.warns(PluginWarning, match=NAMED + r"refuses\(\) of attention backend 'failing': RuntimeError: boom"):
        llm = LLM("tiny", plugins=[plugin], **SMALL)
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].finished
    with pytest.warns(PluginWarning, match="boom"):
        found = explain(VllmConfig.make(model="tiny"), [plugin])
    assert found.layers[0].backend != "failing" and re.match(NAMED, dict(found.layers[0].candidates)["failing"])
    for start in (lambda: LLM("tiny", plugins=[plugin], attention_backend="failing", **SMALL), lambda: explain(WANTED, [plugin])):
        with pytest.raises(PluginError, match=NAMED + "refuses"):
            start()


WANTED = VllmConfig.make(model="tiny", attention_backend="failing")


@pytest.mark.parametrize("method", ["__init__", "forward", "compute_logits"])
def test_a_model_that_fails_while_the_engine_starts(method):
    plugin = Failing("model", type("Failing", (LlamaForCausalLM,), failing(method)), "LlamaForCausalLM", override=True)
    with pytest.raises(PluginError, match=NAMED + r".*boom: RuntimeError: boom") as caught:
        LLM("tiny", plugins=[plugin], **SMALL)
    assert ("from the config.json of" in str(caught.value)) == (method == "__init__")
    if method == "__init__":
        with pytest.raises(PluginError, match=NAMED + r".*boom: RuntimeError: boom"):
            explain(VllmConfig.make(model="tiny"), [plugin])


@pytest.mark.parametrize("method", ["__init__", "render_prompt"])
def test_a_renderer_that_fails(method):
    plugin = Failing("renderer", type("Failing", (HfRenderer,), failing(method)))
    with pytest.raises(PluginError, match=NAMED + r".*: RuntimeError: boom"):
        LLM("tiny", plugins=[plugin], renderer="failing", **SMALL).generate("a")


def test_a_step_that_fails_names_the_plugin_in_the_output():
    """The engine goes on: who asked for the step gets the error."""

    class Poisoned(LlamaForCausalLM):
        def forward(self, input_ids, positions, **inputs):
            if (input_ids == 7).any():
                raise RuntimeError("boom")
            return super().forward(input_ids, positions, **inputs)

    with LLM("tiny", plugins=[Failing("model", Poisoned, "LlamaForCausalLM", override=True)], **SMALL) as llm:
        good, bad = llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": [7]}], SamplingParams(max_tokens=2))
    assert good.error is None
    assert re.match(NAMED + r".*Poisoned.forward: RuntimeError: boom", bad.error)
