"""Which tokenizers serve, and what is shared."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import toolkit_lm_tiny
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm_llguidance.backend import LLGuidanceReader
from toolkit_lm_llguidance.locating import locate
from toolkit_lm_llguidance.vocabulary import Vocabulary
from toolkit_lm_structured_output.contract import Source
from toolkit_lm_structured_output.params import StructuredOutputs
from toolkit_lm_structured_output.preparing import Preparation
from toolkit_lm_structured_output.trial import Job
from toolkit_lm_structured_output.trials import Trials

TINY = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
SOURCE = Source(str(TINY / "tokenizer.json"), (3,))


def renderer(folder=TINY, eos_token_ids=(3,), texts=None):
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(path=str(folder)),
        renderer=SimpleNamespace(tokenizer=None),
        plugins=VllmConfig.make(model="any").plugins,
    )
    made = SimpleNamespace(
        config=config, plugins=None, eos_token_ids=list(eos_token_ids), vocab_size=1536
    )
    made.token_texts = texts or (
        lambda ids: [Vocabulary.of(SOURCE).tokenizer.decode_str([token]) for token in ids]
    )
    return made


def test_renderers_that_do_not_serve(tmp_path):
    with pytest.raises(RequestError, match=r"needs a tokenizer\.json, and .* has none"):
        Preparation(renderer(tmp_path))
    with pytest.raises(RequestError, match="needs an end-of-sequence token"):
        Preparation(renderer(eos_token_ids=()))
    with pytest.raises(RequestError, match=r"are not those of SimpleNamespace"):
        Preparation(renderer(texts=lambda ids: [str(token) for token in ids]))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match=r"llguidance cannot read"):
        Preparation(renderer(tmp_path))
    assert Preparation(renderer()).source.size == 1536


def test_a_request_names_what_it_gave(tmp_path):
    class Unserved(SimpleNamespace):
        __hash__ = object.__hash__

    with pytest.raises(RequestError, match=r"needs a tokenizer\.json"):
        StructuredOutputs(guided_regex="a").prepare(Unserved(**vars(renderer(tmp_path))))


def test_a_vocabulary_is_shared_while_it_is_used():
    first = Vocabulary.of(SOURCE)
    assert Vocabulary.of(Source(SOURCE.path, (3,))) is first
    assert Vocabulary.of(Source(SOURCE.path, (2,))) is not first
    known = Vocabulary._known
    del first
    gc.collect()
    assert Source(SOURCE.path, (2,)) not in known


def test_the_processes_end_with_what_uses_them():
    trials = Trials(SOURCE, LLGuidanceReader.compiler)
    assert trials.error_of(Job('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}')) == ""
    [process] = trials._idle
    popen = process._popen
    assert popen.poll() is None
    del process, trials
    gc.collect()
    assert popen.poll() is not None


def test_a_process_that_dies_is_replaced():
    trials = Trials(SOURCE, LLGuidanceReader.compiler)
    jobs = [
        Job(f'{{"grammars": [{{"lark_grammar": "start: \\"{letter}\\""}}]}}') for letter in "abc"
    ]
    assert trials.error_of(jobs[0]) == ""
    trials._idle[0]._popen.kill()
    trials._idle[0]._popen.wait()
    assert "too complex" in trials.error_of(jobs[1])
    assert trials.error_of(jobs[2]) == ""
    assert trials.error_of(jobs[0]) == ""


def test_the_place_of_an_error():
    def error_of(schema):
        return "bad" if '"bad"' in str(schema).replace("'", '"') else ""

    schema = {
        "properties": {"a/b~": {"items": {"anyOf": [{}, {"format": "bad"}]}}},
        "$defs": {"c": {}},
    }
    assert locate(schema, "bad", error_of) == "#/properties/a~1b~0/items/anyOf/1"
    assert locate({"enum": ["bad"]}, "bad", error_of) == "#"
    assert (
        locate({"properties": {str(i): {} for i in range(1000)}, "x": "bad"}, "bad", error_of)
        == "#"
    )
