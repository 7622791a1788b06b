"""Which pair renderer a pooling engine uses, and what it is asked."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import PluginError, RequestError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.renderer import RenderedText
from toolkit_lm_pooling_adapters.inputs import PoolingInputProcessor
from toolkit_lm_pooling_adapters.pair_renderer import PairRenderer
from toolkit_lm_pooling_adapters.registry import PairRendererRegistry

PAGE = Path(__file__).parents[3] / "docs" / "hooks" / "toolkit_register_pair_renderers.md"


class Joined(PairRenderer):
    takes_instruction = True

    def render_pair(self, query, document, instruction=None, *, max_tokens=None):
        return [len(query), len(document), len(instruction or ""), max_tokens or 0]


class Plain(Joined):
    takes_instruction = False


class Brings:
    def __init__(self, *names):
        self.name = names[0]
        self.names = names

    @hookimpl
    def toolkit_register_pair_renderers(self, renderers):
        for name in self.names:
            renderers.add(name, f"pair_renderers_of_a_test:{name}")


class Text:
    """A renderer of texts and pairs: the number of their characters."""

    def render_texts(self, texts, *, max_tokens=None):
        return [
            RenderedText([len(text) if isinstance(text, str) else sum(map(len, text))])
            for text in texts
        ]


@pytest.fixture
def processor(monkeypatch):
    module = types.ModuleType("pair_renderers_of_a_test")
    module.joined = lambda config, renderer, plugins: Joined()
    module.plain = lambda config, renderer, plugins: Plain()
    module.nothing = lambda config, renderer, plugins: None
    module.wrong = lambda config, renderer, plugins: "pairs"
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(*names, **options):
        plugins = Plugins.load(
            PluginsConfig(plugins=["pooling_adapters"]), extra=[Brings(*names)] if names else []
        )
        return PoolingInputProcessor(
            VllmConfig.default(**{"runner": "pooling", **options}), Text(), plugins
        )

    return make


def test_pairs_and_texts(processor):
    made = processor("joined")
    rendered = made.render(
        [("ab", "c"), "abcd", ("a", "bcd")], truncate_prompt_tokens=9, instruction="now"
    )
    assert [one.token_ids for one in rendered] == [[2, 1, 3, 9], [4], [1, 3, 3, 9]]
    assert [one.token_ids for one in processor().render([("ab", "c"), "abcd"])] == [[3], [4]]


def test_what_was_registered_last_is_asked_first(processor):
    assert type(processor("joined", "plain", "nothing").pair_renderer) is Plain
    assert type(processor("plain", "joined").pair_renderer) is Joined
    assert processor("nothing").pair_renderer is None
    # An engine that generates, and serves embeddings beside, has no pairs.
    assert processor("joined", runner="generate", extra_tasks=["embed"]).pair_renderer is None


def test_instructions(processor):
    for made, words in (
        (processor(), "it has no score template"),
        (processor("plain"), r"its score template has no place {instruction}"),
    ):
        with pytest.raises(
            RequestError, match=f"this model takes no instruction: {words}"
        ) as caught:
            made.render([("a", "b")], instruction="now")
        assert caught.value.param == "instruction"


def test_what_is_refused(processor):
    with pytest.raises(
        PluginError, match=r"pair renderer 'wrong' must return a PairRenderer or None, not a str"
    ):
        processor("wrong")


def test_toolkit_register_pair_renderers(monkeypatch):
    blocks = PAGE.read_text(encoding="utf-8").split("```python\n")[2:]
    entry = types.ModuleType("pairs_example")
    shown = types.ModuleType("toolkit_lm_mine.pairs")
    for module, block in zip((entry, shown), blocks, strict=True):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(block.split("```")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "toolkit_lm_mine", types.ModuleType("toolkit_lm_mine"))
    plugins = Plugins.load(PluginsConfig(plugins=["pooling_adapters"]), extra=[entry])
    registry = plugins.brought_registry(PairRendererRegistry)
    assert registry.get("mine").target == "toolkit_lm_mine.pairs:make_pair_renderer"
    renderer = types.SimpleNamespace(
        render_texts=lambda texts, *, max_tokens: [
            RenderedText([len(text) for text in texts][:max_tokens])
        ]
    )
    made = registry.make(
        "mine", VllmConfig.default({"architectures": ["MineForCausalLM"]}), renderer, plugins
    )
    assert made.render_pair("ab", "cde", max_tokens=4) == [6]
    assert (
        registry.make(
            "mine", VllmConfig.default({"architectures": ["OtherForCausalLM"]}), renderer, plugins
        )
        is None
    )
