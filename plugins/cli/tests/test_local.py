"""A model in this process: what it thinks is told from what it answers."""

from __future__ import annotations

import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli.local import LocalTalker
from toolkit_lm_cli.sampling import SamplingFlags
from toolkit_lm_cli.screen import PlainScreen, Thought

TEMPLATES = {
    "begun": (
        "{# </think> #}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if "
        "add_generation_prompt %}<think>\n{% endif %}"
    ),
    "marks that are special": (
        "{# [THINK][/THINK] #}{% for m in messages %}{{ m['content'] }}{% endfor %}[THINK]"
    ),
    "none": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
ASKED = [{"role": "user", "content": "Two and two?"}]


@pytest.fixture(scope="module", params=TEMPLATES)
def talker(request, checkpoint_with):
    special = request.param == "marks that are special"
    folder = checkpoint_with(
        TEMPLATES[request.param], ("[THINK]", "[/THINK]") if special else (), special=True
    )
    options = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    one = LocalTalker(VllmConfig.make(model=str(folder), **options), Plugins.load())
    yield request.param, one
    one.close()


def flags(**given) -> SamplingFlags:
    made = SamplingFlags(Plugins.load().logits_processors)
    made.update({"seed": 1, "max_tokens": 40, "ignore_eos": True, **given})
    return made


def test_thoughts_are_told_from_the_answer(talker):
    kind, one = talker
    budget = {} if kind == "none" else {"thinking_token_budget": 9}
    pieces = list(one.chat(ASKED, flags(**budget)))
    thought = "".join(piece for piece in pieces if isinstance(piece, Thought))
    answer = "".join(piece for piece in pieces if not isinstance(piece, Thought))
    assert bool(thought) is (kind != "none") and answer
    assert not any(mark in thought + answer for mark in ("</think>", "THINK]"))
    assert one.usage.output == 40
    # All of an answer without an end of its reasoning is reasoning, and its end is held back no
    # longer.
    if kind != "none":
        assert all(isinstance(piece, Thought) for piece in one.chat(ASKED, flags()) if piece)


def test_a_stop_text_ends_the_answer_and_not_the_thought(talker):
    kind, one = talker
    budget = {} if kind == "none" else {"thinking_token_budget": 9}

    def said(**given) -> tuple[str, str]:
        pieces = list(one.chat(ASKED, flags(**budget, **given)))
        thought = "".join(piece for piece in pieces if isinstance(piece, Thought))
        return thought, "".join(piece for piece in pieces if not isinstance(piece, Thought))

    thought, answer = said()
    stop = next(character for character in answer if character in (thought or answer))
    assert said(stop=stop) == (thought, answer.partition(stop)[0])


def test_a_text_that_is_completed_has_no_parts(talker):
    _, one = talker
    assert not any(isinstance(piece, Thought) for piece in one.complete("<think>", flags()))


def test_an_answer_that_nobody_reads_on_ends(talker):
    _, one = talker
    stream = one.chat(ASKED, flags())
    next(stream)
    stream.close()
    assert not one._engine.has_unfinished_requests()
    assert PlainScreen().show(one.chat(ASKED, flags(max_tokens=2))).is_whole
