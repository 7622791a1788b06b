"""The schemas of the JSON-Schema-Test-Suite (github.com/json-schema-org): of each that is accepted,
all documents are valid.

json_schema_test_suite.json has them by draft, as file, description and schema; those that refer to
other files are left out.
"""

from __future__ import annotations

import json
import random
from decimal import Decimal
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import toolkit_lm_tiny
from llguidance import LLMatcher
from toolkit_lm_llguidance.backend import LLGuidanceCompiler
from toolkit_lm_llguidance.grammars import grammar_of_schema, options_of
from toolkit_lm_llguidance.vocabulary import Vocabulary, limits
from toolkit_lm_structured_output.contract import Source
from toolkit_lm_structured_output.wishes import Wish

SUITE = json.loads(Path(__file__).with_name("json_schema_test_suite.json").read_text())
DRAFTS = {
    "draft4": jsonschema.Draft4Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
ACCEPTED = {"draft4": 120, "draft7": 160, "draft2020-12": 160}
"""At least so many of their schemas."""
EOS = 3
MOST = 150


@pytest.fixture(scope="module")
def vocabulary():
    folder = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] in (
        EOS,
        [EOS],
    )
    return Vocabulary.of(Source(str(folder / "tokenizer.json"), (EOS,)))


def draw(vocabulary, grammar, generator, closing):
    """A document of random tokens, with a liking for what closes strings and objects; None where it
    is not at its end in time."""
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits())
    token_ids = []
    for _ in range(MOST):
        allowed = np.flatnonzero(
            np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ).tolist()
        assert allowed and not matcher.is_error(), matcher.get_error()
        if EOS in allowed and (len(allowed) == 1 or generator.random() < 0.3):
            return vocabulary.tokenizer.decode_bytes(token_ids).decode()
        liked = (
            [token for token in closing if token in allowed]
            if len(allowed) > 50 and generator.random() < 0.5
            else []
        )
        token_ids.append(generator.choice(liked or [token for token in allowed if token != EOS]))
        assert matcher.consume_token(token_ids[-1])
    return None


def wrong(validator, text):
    """The errors of a document, but for those that come of floating point."""
    for error in validator.iter_errors(json.loads(text)):
        if error.validator != "multipleOf" or Decimal(str(error.instance)) % Decimal(
            str(error.validator_value)
        ):
            yield f"{text}: {error.message}"


def check(vocabulary, draft, draws):
    kind = DRAFTS[draft]
    accepted = 0
    compiler = LLGuidanceCompiler(vocabulary.source)
    closing = vocabulary.tokenizer.tokenize_str('"}],: 0')
    for file, description, schema in SUITE[draft]:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        else:
            schema = {"$schema": kind.META_SCHEMA["$schema"], **schema}
        options = options_of(Wish("", "json", schema))
        grammar = grammar_of_schema(schema, options)
        if compiler.error_of(grammar, {"schema": schema, "options": options}):
            continue
        accepted += 1
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        generator = random.Random(description)
        for _ in range(draws):
            text = draw(vocabulary, grammar, generator, closing)
            errors = [] if text is None else list(wrong(validator, text))
            assert not errors, f"{draft}, {file}, {description}: {errors[0]}"
    assert accepted >= ACCEPTED[draft]


@pytest.mark.parametrize("draft", DRAFTS)
def test_documents_are_valid(vocabulary, draft):
    check(vocabulary, draft, 3)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "draws",
    [pytest.param(20, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_many_documents_are_valid(vocabulary, draft, draws):
    check(vocabulary, draft, draws)
