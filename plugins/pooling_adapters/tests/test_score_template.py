"""Score templates: how their places are filled, tokenized and cut, and which one an engine
takes."""

from __future__ import annotations

import json
import struct
import sys
import types
from pathlib import Path

import msgspec
import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, ContextLengthError, PluginError, RequestError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.renderer import Rendered, RenderedText, Renderer
from toolkit_lm_pooling_adapters.registry import ScoreTemplateRegistry
from toolkit_lm_pooling_adapters.score_template import (
    ScoreTemplate,
    read_score_template,
    score_prompt,
    score_tokens,
)
from toolkit_lm_pooling_adapters.template_choice import choose_score_template
from toolkit_lm_pooling_adapters.template_renderer import make_template_renderer

BOS = 1
EOS = 2


class TwoCharacters(Renderer):
    """A token is two characters of one text, or the last one; so that it matters where texts are
    tokenized apart."""

    def render_prompt(self, prompt, *, add_special_tokens=True):
        assert prompt, "an empty text is no prompt"
        ids = [hash_of(prompt[i : i + 2]) for i in range(0, len(prompt), 2)]
        return Rendered([BOS, *ids, EOS] if add_special_tokens else ids)

    def render_texts(self, texts, *, max_tokens=None):
        rendered = []
        for text in texts:
            ids = self.render_prompt(text, add_special_tokens=False).token_ids
            rendered.append(
                RenderedText([BOS, *ids[: None if max_tokens is None else max_tokens - 2], EOS])
            )
        return rendered

    def render_conversation(self, messages, **kwargs):
        raise NotImplementedError

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise NotImplementedError

    def decode(self, token_ids, *, skip_special_tokens=False):
        raise NotImplementedError

    def token_texts(self, token_ids):
        raise NotImplementedError

    vocab_size = 0
    eos_token_ids = []


def hash_of(text):
    return int.from_bytes(text.encode(), "big") + 10


def tokens_of(*pieces):
    return [hash_of(piece[i : i + 2]) for piece in pieces for i in range(0, len(piece), 2)]


RENDERER = TwoCharacters(VllmConfig.default())
TEMPLATE = ScoreTemplate(
    pieces=("{instruction}Q {query}", ";", "D {document}", "=> {0}"),
    instruction_text="I {instruction};",
)


def test_places_are_filled_once():
    assert score_prompt(TEMPLATE, "what?", "that") == "Q what?;D that=> {0}"
    assert (
        score_prompt(TEMPLATE, "{document}", "{query}{instruction}", "now")
        == "I now;Q {document};D {query}{instruction}=> {0}"
    )
    with_default = msgspec.structs.replace(TEMPLATE, instruction="then")
    assert score_prompt(with_default, "a", "b") == "I then;Q a;D b=> {0}"
    assert score_prompt(with_default, "a", "b", "now") == "I now;Q a;D b=> {0}"
    assert TEMPLATE.takes_instruction
    assert not ScoreTemplate(pieces=("{query}{document}",)).takes_instruction


def test_pieces_are_tokenized_apart():
    assert score_tokens(RENDERER, TEMPLATE, "abc", "defg") == tokens_of(
        "Q abc", ";", "D defg", "=> {0}"
    )
    special = msgspec.structs.replace(TEMPLATE, add_special_tokens=True)
    assert score_tokens(RENDERER, special, "abc", "defg") == [
        BOS,
        *tokens_of("Q abc", ";", "D defg", "=> {0}"),
        EOS,
    ]


@pytest.mark.parametrize("special", [False, True])
def test_a_document_that_is_too_long_is_cut(special):
    template = msgspec.structs.replace(TEMPLATE, add_special_tokens=special)
    whole = score_tokens(RENDERER, template, "abc", "defghij")
    assert score_tokens(RENDERER, template, "abc", "defghij", max_tokens=len(whole)) == whole
    cut = score_tokens(RENDERER, template, "abc", "defghij", max_tokens=len(whole) - 2)
    expected = tokens_of("Q abc", ";", "D defg", "=> {0}")
    assert cut == ([BOS, *expected, EOS] if special else expected)
    taken = len(whole) - len(tokens_of("defghij"))
    assert (
        len(score_tokens(RENDERER, template, "abc", "defghij", max_tokens=taken + 1)) == taken + 1
    )
    for most in (taken, taken - 1, 4):
        with pytest.raises(
            ContextLengthError,
            match=rf"the query and the score template take {taken} tokens, but {most} are allowed",
        ) as caught:
            score_tokens(RENDERER, template, "abc", "defghij", max_tokens=most)
        assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("query", ["abc", "abcd"])
def test_a_query_is_not_cut_where_it_shares_a_piece_with_the_document(query):
    template = ScoreTemplate(pieces=("Q {query} D {document}", "="))
    whole = tokens_of(f"Q {query} D efghij")
    taken = len(tokens_of(f"Q {query} D ", "="))
    assert score_tokens(RENDERER, template, query, "efghij", max_tokens=taken + 1) == [
        *whole[:taken],
        *tokens_of("="),
    ]
    # After a query of four characters, the document begins inside of a token.
    least = taken if query == "abcd" else taken + 1
    for most in (1, 3, least - 1):
        with pytest.raises(
            ContextLengthError,
            match=f"the query and the score template take {taken} tokens, but {most} are allowed",
        ):
            score_tokens(RENDERER, template, query, "efghij", max_tokens=most)
    assert (
        len(
            {
                tuple(score_tokens(RENDERER, template, query, text, max_tokens=least))
                for text in ("efghij", "klmnop")
            }
        )
        == 2
    )


def test_what_is_empty_or_no_text_is_refused():
    for query, document, name in (("", "a", "query"), ("a", "", "document"), ("", "", "query")):
        with pytest.raises(RequestError, match=f"the {name} is empty") as caught:
            score_tokens(RENDERER, TEMPLATE, query, document)
        assert caught.value.param == "input"
    with pytest.raises(RequestError, match="the instruction must be a text, not a int") as caught:
        score_tokens(RENDERER, TEMPLATE, "a", "b", 5)
    assert caught.value.param == "instruction"


def test_a_template_without_its_places_is_refused():
    with pytest.raises(ConfigError, match=r"must have {query} once, but this one has it 0 times"):
        ScoreTemplate(pieces=("{document}",))
    with pytest.raises(
        ConfigError, match=r"must have {document} once, but this one has it 2 times"
    ):
        ScoreTemplate(pieces=("{query}{document}", "{document}"))
    with pytest.raises(ConfigError, match=r"must end with {document}"):
        ScoreTemplate(pieces=("{query}{document}.",))


def test_a_template_in_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Q: {query}\nD: {document}\nA:\n")
    template = read_score_template(path)
    assert template.pieces == ("Q: {query}\nD: {document}", "\nA:")
    assert template.add_special_tokens
    path.write_text("Q: {query}")
    with pytest.raises(ConfigError, match=r"mine.txt': a score template must have {document} once"):
        read_score_template(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"mine.txt' cannot be read"):
        read_score_template(path)


class Brings:
    """A plugin with templates for one architecture."""

    name = "brings"
    templates = {
        "own": ("score_templates_of_a_test:OWN", ()),
        "known": ("score_templates_of_a_test:KNOWN", ("KnownForCausalLM",)),
    }

    @hookimpl
    def toolkit_register_score_templates(self, templates):
        for name, (target, architectures) in self.templates.items():
            templates.add(name, target, architectures=architectures)


class Later(Brings):
    name = "later"
    templates = {"later": ("score_templates_of_a_test:LATER", ("KnownForCausalLM",))}


class Made(Brings):
    name = "made"
    templates = {"made": ("score_templates_of_a_test:MADE", ("KnownForCausalLM",))}


class Wrong(Brings):
    name = "wrong"
    templates = {"wrong": ("score_templates_of_a_test:__name__", ())}


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """Chooses a template for a checkpoint of an architecture."""
    module = types.ModuleType("score_templates_of_a_test")
    for name in ("OWN", "KNOWN", "LATER"):
        setattr(module, name, ScoreTemplate(pieces=("{query}{document}", name)))
    made = {"classifier_method": "from_2_way_softmax", "classifier_tokens": ("no", "yes")}
    module.MADE = ScoreTemplate(pieces=("{query}{document}", "MADE"), **made)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(architecture="KnownForCausalLM", plugins=(Brings,), **options):
        config = VllmConfig.default(
            {"architectures": [architecture]}, **{"convert": "classify", **options}
        )
        config = msgspec.structs.replace(
            config, checkpoint=msgspec.structs.replace(config.checkpoint, path=str(tmp_path))
        )
        loaded = Plugins.load(
            PluginsConfig(plugins=["pooling_adapters"]), extra=[kind() for kind in plugins]
        )
        template = choose_score_template(config, loaded)
        return template and template.pieces[-1]

    return run


def write_weights(folder, *names):
    header = json.dumps(
        {
            "__metadata__": {},
            **{name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def test_the_template_of_an_architecture(choose, tmp_path):
    assert choose() == "KNOWN"
    assert choose("OtherForCausalLM") is None
    assert choose(convert="embed") is None
    assert choose(classifier_method="no_post_processing") is None
    assert choose(plugins=(Brings, Later)) == "LATER"
    write_weights(tmp_path, "model.norm.weight")
    assert choose() == "KNOWN"
    write_weights(tmp_path, "model.norm.weight", "score.weight")
    assert choose() is None


@pytest.mark.parametrize(
    ("method", "tokens", "is_its"),
    [
        ("from_2_way_softmax", ["no", "yes"], True),
        ("from_2_way_softmax", None, True),
        ("from_2_way_softmax", ["yes", "no"], False),
        ("no_post_processing", ["no", "yes"], False),
        ("no_post_processing", None, False),
    ],
)
def test_the_template_of_a_reranker_whose_options_are_written_out(choose, method, tokens, is_its):
    found = choose(plugins=(Made,), classifier_method=method, classifier_tokens=tokens)
    assert found == ("MADE" if is_its else None)


def test_the_template_of_the_option(choose, tmp_path):
    assert choose("OtherForCausalLM", score_template="own") == "OWN"
    assert choose(score_template="own") == "OWN"
    (tmp_path / "mine").write_text("{query} {document} !")
    assert choose(score_template=str(tmp_path / "mine")) == " !"
    with pytest.raises(
        ConfigError, match=r"'onw' is neither the name of a registered template nor a file.*'own'"
    ):
        choose(score_template="onw")
    with pytest.raises(
        PluginError, match=r"'wrong'.*: score template 'wrong' must be a ScoreTemplate, not a str"
    ):
        choose(plugins=(Wrong,), score_template="wrong")


def test_pairs_are_rendered_with_the_template(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Q {query} D {document}=")
    config = VllmConfig.default({"architectures": ["KnownForCausalLM"]}, score_template=str(path))
    made = make_template_renderer(config, RENDERER, Plugins.load())
    template = read_score_template(path)
    assert not made.takes_instruction
    assert made.render_pair("abc", "defg") == score_tokens(RENDERER, template, "abc", "defg")
    assert made.render_pair("abc", "defg", max_tokens=8) == score_tokens(
        RENDERER, template, "abc", "defg", max_tokens=8
    )
    path.write_text("{instruction} Q {query} D {document}=")
    made = make_template_renderer(config, RENDERER, Plugins.load())
    assert made.takes_instruction
    assert made.render_pair("a", "b", "now") == score_tokens(
        RENDERER, read_score_template(path), "a", "b", "now"
    )
    assert (
        make_template_renderer(
            VllmConfig.default({"architectures": ["KnownForCausalLM"]}), RENDERER, Plugins.load()
        )
        is None
    )


def test_toolkit_register_score_templates(monkeypatch):
    page = Path(__file__).parents[3] / "docs" / "hooks" / "toolkit_register_score_templates.md"
    plugin, shown = (types.ModuleType(name) for name in ("example", "shown"))
    for block, module in ((2, plugin), (3, shown)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(
            page.read_text(encoding="utf-8").split("```python\n")[block].split("```")[0],
            module.__dict__,
        )
    templates = Plugins.load(
        PluginsConfig(plugins=["pooling_adapters"]), extra=[plugin]
    ).brought_registry(ScoreTemplateRegistry)
    assert templates.keys()[-1] == "mine"
    entry = templates.get("mine")
    assert (entry.target, entry.architectures) == (
        "toolkit_lm_mine.score_templates:MINE",
        ("MineForCausalLM",),
    )
    assert (
        score_prompt(shown.MINE, "q", "d", "Instruct.")
        == "Instruct.\nQuery: q\nPassage: d\nRelevant:"
    )
