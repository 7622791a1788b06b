"""The schemas of the JSON-Schema-Test-Suite: of each that is accepted, all documents are valid."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import toolkit_lm_tiny
from tokenizers import Tokenizer
from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.contract import Source
from toolkit_lm_structured_output.wishes import Wish
from toolkit_lm_xgrammar.compiler import XGrammarCompiler
from toolkit_lm_xgrammar.reader import XGrammarReader

SUITE = json.loads(
    (Path(__file__).parents[2] / "llguidance" / "tests" / "json_schema_test_suite.json").read_text()
)
DRAFTS = {
    "draft4": jsonschema.Draft4Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
ACCEPTED = {"draft4": 25, "draft7": 45, "draft2020-12": 45}
"""At least so many of their schemas."""
EOS = 3
SOURCE = Source(
    str(Path(toolkit_lm_tiny.__file__).parent / "checkpoint" / "tokenizer.json"), (EOS,), 1536
)


@pytest.fixture(scope="module")
def compiler():
    return XGrammarCompiler(SOURCE)


@pytest.mark.parametrize("draft", DRAFTS)
def test_documents_are_valid(compiler, draft):
    tokenizer = Tokenizer.from_file(SOURCE.path)
    accepted = 0
    closing = tokenizer.encode('"}],: 0', add_special_tokens=False).ids
    for file, description, schema in SUITE[draft]:
        kind = DRAFTS[draft]
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        else:
            schema = {"$schema": kind.META_SCHEMA["$schema"], **schema}
        try:
            grammar = XGrammarReader(SOURCE, None).read(Wish("", "json", schema)).grammar
        except RequestError:
            continue
        if compiler.error_of(grammar, None):
            continue
        accepted += 1
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        generator = random.Random(description)
        for _ in range(4):
            text = draw(compiler, grammar, generator, closing, tokenizer)
            errors = (
                []
                if text is None
                else [error.message for error in validator.iter_errors(json.loads(text))]
            )
            assert not errors, f"{draft}, {file}, {description}: {errors[0]}"
    assert accepted >= ACCEPTED[draft]


def draw(compiler, grammar, generator, closing, tokenizer):
    """A document of random tokens, with a liking for what closes strings and objects; None where it
    is not at its end in time."""
    matcher = compiler.compile(grammar)
    token_ids = []
    mask = np.zeros(-(-compiler.size // 32), np.int32)
    for _ in range(150):
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        if EOS in allowed and (len(allowed) == 1 or generator.random() < 0.3):
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        liked = (
            [token for token in closing if token in allowed]
            if len(allowed) > 50 and generator.random() < 0.5
            else []
        )
        token_ids.append(generator.choice(liked or [token for token in allowed if token != EOS]))
        matcher.consume(token_ids[-1])
    return None
