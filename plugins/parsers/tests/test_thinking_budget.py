"""Reasoning ends when its budget is spent, whatever else is asked of a request and however the
engine runs it."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.renderer import Rendered
from toolkit_lm.sampling import ProcessorRow
from toolkit_lm_parsers.marks import ReasoningReader, mark_texts
from toolkit_lm_parsers.params import ThinkingParams
from toolkit_lm_parsers.thinking_budget import SequenceBudget

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Hello", "What is the sum of two and two?", "x y z " * 8)
]
BEGUN = (
    "{# </think> #}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if "
    "add_generation_prompt %}\nA:<think>\n{% endif %}"
)
OPEN = BEGUN.replace("<think>\n{% endif %}", "{% endif %}")
CHANNELS = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}<|start|>assistant{# <|channel|> "
    "<|message|> #}"
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
BUDGET = 12


@pytest.fixture(scope="session")
def folders(checkpoint_with):
    """Folders by the form of marks: letters, or tokens of their own."""
    return {
        "letters": checkpoint_with(BEGUN),
        "tokens": checkpoint_with(BEGUN, ("<think>", "</think>")),
    }


class Preempted:
    name = "preempted"

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += getattr(event, "kind", None) == "preempted"


PREEMPTED = Preempted()


@contextmanager
def engine(folder, **options):
    given = {
        "load_format": "dummy",
        "dtype": "float32",
        "max_num_seqs": 16,
        "block_size": 4,
        "plugins": [PREEMPTED],
        **options,
    }
    with LLM(str(folder), **given) as llm:
        yield llm


def params(budget=BUDGET, **given):
    budgets = {} if budget is None else {"thinking_token_budget": budget}
    more = given.pop("extra_args", {})
    return SamplingParams(
        **{
            "max_tokens": 60,
            "seed": 3,
            "temperature": 1.0,
            "ignore_eos": True,
            "extra_args": {**budgets, **more},
            **given,
        }
    )


def answers(llm, given, chats=CHATS):
    return [one for output in llm.chat(chats, given, use_tqdm=False) for one in output.outputs]


def counted(llm, token_ids, chat=CHATS[0]):
    """The tokens of reasoning."""
    parsers = Plugins.load().parsers
    renderer = llm.engine.renderer
    name = parsers.find_format("reasoning", renderer.chat_template_source)
    counters = parsers.make(name, renderer.chat_template_source).reasoning_counters(renderer)
    counter = counters(renderer.render_conversation(chat).token_ids)
    counter.push(token_ids)
    return counter.num_tokens


@pytest.mark.parametrize("marks", ["letters", "tokens"])
@pytest.mark.parametrize("budget", [0, 1, BUDGET])
def test_reasoning_ends_when_its_budget_is_spent(folders, marks, budget):
    with engine(folders[marks]) as llm:
        free = answers(llm, params(None, n=2))
        held = answers(llm, params(budget, n=2))
        end = llm.engine.renderer.render_prompt("</think>", add_special_tokens=False).token_ids
        assert len(end) == (1 if marks == "tokens" else len("</think>"))
        for before, after in zip(free, held, strict=True):
            assert before.token_ids[: budget + len(end)] != after.token_ids[: budget + len(end)], (
                "the model would have ended it by itself"
            )
            assert after.token_ids[:budget] == before.token_ids[:budget]
            assert after.token_ids[budget : budget + len(end)] == end
            assert len(after.token_ids) == 60 and after.text.count("</think>") == 1
            assert counted(llm, after.token_ids) == budget


def test_no_budget_and_a_large_one_change_nothing(folders):
    with engine(folders["tokens"]) as llm:
        free = [one.token_ids for one in answers(llm, params(None))]
        for budget in (-1, 1000):
            assert [one.token_ids for one in answers(llm, params(budget))] == free


@pytest.mark.parametrize("marks", ["letters", "tokens"])
def test_preemption_prefix_caching_and_drafts_change_nothing(folders, marks):
    given = params(n=3, max_tokens=40)
    with engine(folders[marks], enable_prefix_caching=False) as llm:
        expected = [one.token_ids for one in answers(llm, given)]
    before = PREEMPTED.count
    with engine(
        folders[marks], num_kv_blocks=48, max_num_batched_tokens=32, max_model_len=160
    ) as llm:
        assert [one.token_ids for one in answers(llm, given)] == expected
        assert [one.token_ids for one in answers(llm, given)] == expected
    assert PREEMPTED.count > before


def test_drafts_change_nothing(folders):
    given = params(n=2, max_tokens=40, temperature=0.05)
    with engine(folders["letters"]) as llm:
        expected = [one.token_ids for one in answers(llm, given)]
    with engine(folders["letters"], drafter="ngram") as llm:
        assert [one.token_ids for one in answers(llm, given)] == expected


def test_other_processors_and_log_probabilities_go_with_it(folders):
    given = params(logprobs=1, extra_args={"no_repeat_ngram_size": 2, "xtc_probability": 0.5})
    with engine(folders["tokens"]) as llm:
        for one in answers(llm, given):
            assert counted(llm, one.token_ids) == BUDGET and len(one.logprobs) == 60
    with engine(folders["letters"]) as llm:
        # The prompt has "th" already, so that the mark is ruled out where it is half written. It is
        # not tried again.
        for one in answers(llm, given):
            assert one.text.count("</") == 1 and "</th" not in one.text


@pytest.mark.parametrize("marks", ["letters", "tokens"])
def test_a_structure_begins_after_the_end(folders, marks):
    with engine(folders[marks]) as llm:
        renderer = llm.engine.renderer
        form = Plugins.load().parsers.make("think", renderer.chat_template_source)
        structure = form.after_reasoning(
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": one} for one in ("yes", "no")],
            },
            {},
        )
        asked = {"structural_tag": {"type": "structural_tag", "format": structure}}
        for one in answers(llm, params(n=2, structured_outputs=asked, ignore_eos=False)):
            _, end, answer = one.text.partition("</think>\n\n")
            assert end and answer in ("yes", "no") and one.finish_reason == "stop"
            assert BUDGET <= counted(llm, one.token_ids) <= BUDGET + 3, (
                "a character is written to its end"
            )


def test_what_is_ruled_out_is_not_forced(folders):
    with engine(folders["tokens"]) as llm:
        [end] = llm.engine.renderer.render_prompt("</think>", add_special_tokens=False).token_ids
        for one in answers(llm, params(allowed_token_ids=[40, 41, 42])):
            assert set(one.token_ids) <= {40, 41, 42}
        for one in answers(llm, params(allowed_token_ids=[40, 41, end])):
            assert one.token_ids.index(end) <= BUDGET


def test_a_model_that_begins_by_itself_is_held_too(checkpoint_with):
    with engine(checkpoint_with(OPEN, ("<think>", "</think>"))) as llm:
        start, end = (
            llm.engine.renderer.render_prompt(mark, add_special_tokens=False).token_ids[0]
            for mark in ("<think>", "</think>")
        )
        for one in answers(
            llm, params(2, allowed_token_ids=[start, 40, end], logit_bias={start: 50, end: -50})
        ):
            assert one.token_ids[:4] == [start, start, start, end]
        for one in answers(llm, params(2, allowed_token_ids=[40, 41, start])):
            assert one.token_ids[0] == start or end not in one.token_ids


def test_of_several_stretches_of_reasoning_the_second_is_the_last(checkpoint_with):
    with engine(checkpoint_with(CHANNELS, HARMONY)) as llm:
        renderer = llm.engine.renderer
        begun = "<|channel|>analysis<|message|>"
        thinking = renderer.render_prompt(begun, add_special_tokens=False).token_ids
        space = 40
        forced = renderer.render_prompt(
            "<|end|><|start|>assistant", add_special_tokens=False
        ).token_ids
        final = renderer.render_prompt(
            "<|channel|>final<|message|>", add_special_tokens=False
        ).token_ids
        # A stubborn model: it would think for ever.
        script = [*thinking, *[space] * 3, *forced, *thinking, *forced, *final, *[space] * 3]
        arguments = llm.engine.plugins.logits_processors.parse({"thinking_token_budget": 3})[
            "thinking_budget"
        ].prepare(renderer)
        prompt = renderer.render_prompt("<|start|>assistant", add_special_tokens=False).token_ids
        row = ProcessorRow(1, np.array(prompt, np.int32), len(prompt), 0)
        sequence = SequenceBudget(row, arguments)
        for place in range(len(script)):
            tokens = np.array([*prompt, *script[:place]], np.int32)
            following = sequence.must_follow(row._replace(token_ids=tokens))
            again = SequenceBudget(row, arguments).must_follow(row._replace(token_ids=tokens))
            assert following == again
            is_forced = place in range(
                len(thinking) + 3, len(thinking) + 3 + len(forced)
            ) or place in range(2 * len(thinking) + 3 + len(forced), len(script) - 3)
            assert following[:1] == ([script[place]] if is_forced else []), place


def test_a_budget_that_cannot_be_held_to_is_refused(checkpoint, checkpoint_with, folders):
    with (
        engine(checkpoint) as llm,
        pytest.raises(RequestError, match=r"no reasoning that is known here.*think") as raised,
    ):
        answers(llm, params())
    assert raised.value.param == "thinking_token_budget"
    with engine(checkpoint) as llm:
        assert answers(llm, params(0, extra_args={"thinking_format": "think"}))
        with pytest.raises(RequestError, match="thinkk"):
            answers(llm, params(extra_args={"thinking_format": "thinkk"}))
        with pytest.raises(RequestError, match="finds no reasoning"):
            answers(llm, params(extra_args={"thinking_format": "hermes"}))
    for wrong in (-2, 1.5, "9"):
        with (
            engine(folders["letters"]) as llm,
            pytest.raises(RequestError, match="thinking_token_budget"),
        ):
            answers(llm, params(wrong))


def test_plugins_are_loaded_once_for_a_renderer(folders, monkeypatch):
    with engine(folders["letters"]) as llm:
        answers(llm, params())

        def load(*arguments):
            raise AssertionError("for each request")

        monkeypatch.setattr(Plugins, "load", load)
        answers(llm, params())


class OwnFormat:
    name = "own_format"

    @hookimpl
    def toolkit_register_parsers(self, parsers):
        parsers.add("own", "toolkit_lm_parsers.thinking:ThinkFormat")


def test_formats_of_plugins_that_are_objects_have_budgets(folders):
    with engine(folders["letters"], plugins=[OwnFormat()]) as llm:
        asked = params(0, extra_args={"thinking_format": "own"})
        assert [one.token_ids for one in answers(llm, asked)] == [
            one.token_ids for one in answers(llm, params(0))
        ]


def test_a_tokenizer_without_the_mark_is_refused(checkpoint_with):
    folder = checkpoint_with(BEGUN.replace("A:<think>\n", "A:"))
    told = json.loads((folder / "tokenizer.json").read_text())
    kept = [token for token in told["model"]["vocab"] if token not in "<>/"]
    told["model"]["vocab"] = {token: number for number, token in enumerate(kept)}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    with engine(folder) as llm, pytest.raises(RequestError, match="cannot write '</think>'"):
        answers(llm, params())


def test_marks_are_found_however_they_are_cut_into_tokens():
    class Renderer:
        texts = [
            "<",
            "/",
            "think",
            ">",
            "</",
            "thi",
            "nk>",
            "</think>",
            ".</",
            "think>\n",
            "\n",
            "a",
            "<think>",
            "<thi",
            "b<",
        ]
        vocab_size = len(texts)

        def token_texts(self, token_ids):
            return [self.texts[token] for token in token_ids]

    renderer = Renderer()
    marks = Plugins.load().parsers.make("think", "").marks
    texts = mark_texts(renderer, marks)
    assert {token for token in range(renderer.vocab_size) if token not in texts} == {
        renderer.texts.index("a")
    }

    def read(*words, prompt=()):
        reader = ReasoningReader(marks, texts, [renderer.texts.index(word) for word in prompt])
        reader.push([renderer.texts.index(word) for word in words])
        return reader.num_tokens, reader.is_inside

    assert read("<think>", "a", "a", "</think>", "a") == (2, False)
    assert read("\n", "\n", "<thi", "nk>", "a", "a", "<", "/", "thi", "nk>", "a") == (2, False)
    assert read("a", "a", ".</", "think>\n", "a", prompt=["a", "<think>", "\n"]) == (2, False)
    assert read("a", "<", "<", "/", "a", "</", "thi", "a", prompt=["<", "think>\n"]) == (8, True)
    assert read("b<", "/", "think", ">", prompt=["<think>"]) == (0, False)
    assert read("a", "<think>", "a") == (0, False)
    assert read("a", "a", prompt=["<think>", "a"]) == (0, False)


def test_special_tokens_are_forced_where_text_is_text():
    """Renderers that write the names of special tokens with letters: Mistral's and gpt-oss's own
    tokenizers."""

    class Renderer:
        specials = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>"]
        vocab_size = 128 + len(specials)
        chat_template_source = "<|channel|><|message|>"
        plugins = None
        config = Plugins.load().configure(VllmConfig.default())

        def token_texts(self, token_ids):
            return [
                chr(token_id) if token_id < 128 else self.specials[token_id - 128]
                for token_id in token_ids
            ]

        def render_prompt(self, text, *, add_special_tokens):
            return Rendered(list(text.encode()))

        def decode(self, token_ids):
            return "".join(self.token_texts(token_ids))

    arguments = ThinkingParams(thinking_token_budget=3).prepare(Renderer())
    assert arguments["forced"] == [129, 128, *b"assistant"]
    assert arguments["forced_again"] == [129, 128, *b"assistant", 130, *b"final", 131]
