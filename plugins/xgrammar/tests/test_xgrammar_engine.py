"""xgrammar through the whole engine: each kind, the limits, and what changes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import jsonschema
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "large": {"type": "boolean"},
        "ways": {"type": "array", "items": {"enum": ["north", "south"]}, "maxItems": 2},
    },
    "required": ["city", "large", "ways"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "[", "schema": SCHEMA, "end": "]"}], "triggers": ["["]}


@pytest.mark.parametrize("compact", [False, True])
def test_documents_are_valid(generate, compact):
    for one in generate({"json": SCHEMA, "disable_any_whitespace": compact}, n=4):
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), SCHEMA)
    assert any(one.finish_reason == "stop" for one in generate({"json": SCHEMA, "disable_any_whitespace": True}, n=4))


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-\d{2}"),
        ({"choice": ["yes", 'no "really"', "d\u00e9j\u00e0 vu\n"]}, 'yes|no "really"|d\u00e9j\u00e0 vu\n'),
        ({"grammar": 'root ::= ("ab" | "cd"){2,3}'}, "(ab|cd){2,3}"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "here it is"}}}, "here it is"),
    ],
    ids=["regex", "choice", "grammar", "tag"],
)
def test_kinds(generate, asked, pattern):
    for one in generate(asked, n=3):
        assert re.fullmatch(pattern, one.text), one.text
        assert one.finish_reason == "stop"


def test_structural_tags(generate, llm):
    """Free text until a trigger comes."""
    [trigger] = llm.engine.renderer.render_prompt("[", add_special_tokens=False).token_ids
    texts = [one.text for one in generate({"structural_tag": TAG}, n=4, logit_bias={trigger: 12.0}, max_tokens=60)]
    assert any("[" in text for text in texts)
    assert all(re.match(r"\s*(\{|$)", text.partition("[")[2]) for text in texts), texts


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"json": {"not": {}}}, r"xgrammar does not hold to 'not' \(at #\)"),
        ({"json": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7}}}}, r"'multipleOf' \(at #/properties/a\)"),
        ({"json": {"type": "array", "items": {"oneOf": [{"type": "integer"}]}}}, r"'oneOf' \(at #/items\)"),
        ({"json": {"minLength": 3}}, "'minLength' of any type but one"),
        ({"json": {"$ref": "http://example.com/a"}}, "'\\$ref' 'http"),
        ({"json": {"type": "string", "pattern": "("}}, "parenthesis is not closed"),
        ({"json": {"type": "object", "required": ["a"]}}, "'required' of properties that it does not name"),
        ({"json": SCHEMA, "whitespace_pattern": " "}, "takes no whitespace_pattern"),
        ({"regex": "("}, "parenthesis is not closed"),
        ({"regex": "a" * 40_000}, "at most 32768"),
        ({"grammar": "root ::= x"}, 'Rule "x" is not defined'),
        ({"choice": []}, "at least one"),
        ({"structural_tag": {"format": {"type": "nonsense"}}}, "the structural tag cannot be used"),
        ({"structural_tag": {**TAG, "triggers": ["<b>"]}}, "begins with none of the triggers"),
    ],
    ids=repr,
)
def test_what_is_refused(generate, asked, reason):
    with pytest.raises(RequestError, match=reason):
        generate(asked)


def test_what_is_not_strict_passes(llm):
    asked = {
        "type": "json_schema",
        "json_schema": {"name": "a", "strict": False, "schema": {"type": "object", "minProperties": 0, "not": {}}},
    }
    [output] = llm.generate("x", SamplingParams(max_tokens=40, extra_args={"response_format": asked}), use_tqdm=False)
    assert output.error is None and output.outputs[0].text.startswith("{")


def test_a_bomb_breaks_no_engine(generate):
    with pytest.raises(RequestError, match="too complex"):
        generate({"regex": "(" * 6 + "a" + "){1,99}" * 6})
    assert generate({"choice": ["yes"]})[0].text == "yes"


@pytest.mark.parametrize(
    "asked",
    [{"regex": "([a-z]{1,50}){1,500}"}, {"grammar": "root ::= (x{1,50}){1,500}\nx ::= [a-z]"}],
    ids=["regex", "grammar"],
)
def test_repetitions_of_repetitions_are_refused(generate, asked):
    """A token takes ever longer to read, up to minutes."""
    with pytest.raises(RequestError, match="too complex: it takes more than 1 s to compile and try"):
        generate(asked)


def test_after_the_end_nothing_comes(generate):
    """It comes where other tokens could follow, too."""
    [one] = generate({"regex": "[a-z]{1,2000}"}, ignore_eos=True, max_tokens=12, logit_bias={3: 100.0})
    assert (one.finish_reason, len(one.token_ids), set(one.token_ids[1:])) == ("length", 12, {3})


def test_the_end(generate):
    [one] = generate({"choice": ["yes"]}, min_tokens=20, max_tokens=40)
    assert (one.text, one.finish_reason) == ("yes", "stop"), "the grammar's end has the last word"
    [one] = generate({"choice": ["yes"]}, ignore_eos=True, max_tokens=12)
    assert (one.text, one.finish_reason, len(one.token_ids)) == ("yes", "length", 12)


def test_special_tokens_are_no_text(generate, llm):
    """They would vanish from the text: a string would be shorter than it must be."""
    special = {id: 50.0 for id in range(4) if id not in llm.engine.renderer.eos_token_ids}
    for one in generate({"regex": "[^a-z]{5}"}, n=3, logit_bias=special):
        assert len(one.text) == 5


TIGHT = {"num_kv_blocks": 30, "block_size": 4, "max_model_len": 112, "max_num_seqs": 8, "max_num_batched_tokens": 12}


def test_the_batch_and_preemption_change_nothing(llm, options):
    prompts = ["Once upon a time there was a little cat", "It", "One day the king", "x y z " * 6] * 2
    asked = [{"json": SCHEMA}, {"regex": "[a-z ]{20,40}"}, {"choice": ["a long choice of words"]}, None] * 2
    params = [SamplingParams(max_tokens=40, seed=5, temperature=1.2, structured_outputs=one) for one in asked]

    def run(llm, *given):
        outputs = llm.generate(*given, use_tqdm=False)
        assert not any(output.error for output in outputs)
        return [output.outputs[0].token_ids for output in outputs]

    alone = [tokens for pair in zip(prompts, params, strict=True) for tokens in run(llm, *pair)]
    assert run(llm, prompts, params) == alone
    with LLM("tiny", **{**options, **TIGHT}) as other:
        assert run(other, prompts, params) == alone


def test_the_half_that_reads_imports_no_torch():
    code = (
        "import sys, toolkit_lm_xgrammar, toolkit_lm_xgrammar.reader, toolkit_lm_structured_output.preparing;"
        "assert not {'torch', 'xgrammar', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
