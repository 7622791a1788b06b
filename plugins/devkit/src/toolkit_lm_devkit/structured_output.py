"""StructuredOutputConformance: what every structured output backend must do, shown on the model
tiny, or on one of the test's choice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from toolkit_lm import LLM, CompletionOutput, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.contract import (
    GrammarCompiler,
    Matcher,
    Source,
    WishReader,
    load_compiler,
)
from toolkit_lm_structured_output.wishes import Wish

from toolkit_lm_devkit.conformance import Conformance

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
DOCUMENT = (
    r'\{"city": ?"([^"\\]|\\.){0,6}", ?"large": ?(true|false), ?"ways": ?\[(("north"|"south")(, '
    r'?("north"|"south"))?)?\]\}'
)
"""The same, compact, as a regular expression."""
ASKED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "regex": ({"regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-[0-9]{2}"),
    "choice": (
        {"choice": ["yes", 'no "really"', "d\u00e9j\u00e0 vu\n"]},
        'yes|no "really"|d\u00e9j\u00e0 vu\n',
    ),
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, DOCUMENT),
    "one text": ({"regex": "The end[.]"}, r"The end\."),
}
"""Requests that all backends serve, each with a pattern or schema for its output."""
WRONG: Mapping[str, Mapping[str, Any]] = {
    "regex": {"regex": "("},
    "pattern": {"json": {"type": "string", "pattern": "("}},
    "long": {"regex": "a" * 40_000},
    "no choice": {"choice": []},
    "two kinds": {"regex": "a", "choice": ["a"]},
    "broken": {"json": "{"},
    "type": {"json": {"type": "objec"}},
    "grammar": {"grammar": "root ::= nothing"},
    "tag": {"structural_tag": {"format": {"type": "nonsense"}}},
}


def _chain(count: int) -> dict[str, Any]:
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
        | {f"d{count}": {"type": "null"}},
    }


BOMBS: Mapping[str, Mapping[str, Any]] = {
    "references": {"json": _chain(3000)},
    "a loop": {"json": {"$ref": "#"}},
    "wide range": {"json": {"type": "number", "minimum": 1e-300, "maximum": 1e300}},
    "properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    },
    "enum": {"json": {"enum": [f"value {i}" for i in range(15_000)]}},
    "items": {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}},
    "length": {"json": {"type": "string", "minLength": 10**9}},
    "pattern": {"json": {"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"}},
    "repeated": {"regex": "(a{1000}){1000}"},
    "repeated later": {"regex": "x?(a{1000}){1000}"},
    "many ways": {"regex": "([a-z]{1,50}){1,500}"},
    "many ways later": {"regex": "[0-9]{20}([a-z]{1,50}){1,500}"},
    "nested groups": {"regex": "(" * 16_000 + "a" + ")" * 16_000},
    "states": {"regex": ".*a.{2000}b"},
    "stars": {"regex": "((a*)*)*b" * 500},
    "words": {"regex": "|".join(f"w{i}" for i in range(4000))},
    "choices": {"choice": [f"{i} choices" for i in range(5000)]},
}
"""Requests meant to break an engine. Each may be refused, served, or fail alone."""
SECONDS = 60.0
"""Far more than each takes on a machine that does nothing else."""
_PROMPTS = ["Once upon a time there was a little cat", "It", "One day the king", "x y z " * 6]
_TIGHT = {
    "num_kv_blocks": 30,
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 12,
}
"""It preempts, and prefills in chunks."""


def generate_structured(
    llm: LLM, asked: Mapping[str, Any] | None, prompt: str = "Once upon a time", **params: Any
) -> list[CompletionOutput]:
    """Sequences of one request, which must not fail. `params`: SamplingParams other than
    `structured_outputs`."""
    arguments = {"max_tokens": 120, "seed": 1, "temperature": 1.5, **params}
    [output] = llm.generate(
        prompt,
        SamplingParams(structured_outputs=None if asked is None else dict(asked), **arguments),
        use_tqdm=False,
    )
    assert output.error is None, output.error
    return output.outputs


def allowed_tokens(matcher: Matcher, size: int) -> list[int]:
    """Allowed next tokens, of a vocabulary of `size` tokens."""
    mask = np.zeros(-(-size // 32), np.int32)
    matcher.fill(mask)
    found: list[int] = np.flatnonzero(
        np.unpackbits(mask.view(np.uint8), count=size, bitorder="little")
    ).tolist()
    return found


class StructuredOutputConformance(Conformance):
    """Subclass it as `class TestMine(StructuredOutputConformance)`; name the backend, and its half
    that reads.

    The distribution that registers it must be installed, and toolkit-lm-tiny unless `model` is
    another one.
    """

    backend: ClassVar[str]
    """The name that it is registered under."""
    reader: ClassVar[type[WishReader]]
    asked: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {}
    """More that it serves, such as grammars in its own words: what is asked for, and the regular
    expression (of Python's) of what comes."""
    unserved: ClassVar[Sequence[str]] = ()
    """Keys of ASKED that it refuses."""
    model: ClassVar[str] = "tiny"
    engine_options: ClassVar[Mapping[str, Any]] = {"device": "cpu", "dtype": "float32"}
    """Options of VllmConfig that every engine gets."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        served = {key: value for key, value in ASKED.items() if key not in cls.unserved}
        return {
            "case": {**served, **cls.asked},
            "refused": {**{key: ASKED[key][0] for key in cls.unserved}, **WRONG},
            "bomb": BOMBS,
        }

    @classmethod
    def engine(cls, **options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "max_num_seqs": 16,
            "plugin_option": [f"structured_output.backend={cls.backend}"],
        }
        return LLM(cls.model, **{**defaults, **cls.engine_options, **options})

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls) -> Iterator[LLM]:
        with cls.engine() as llm:
            yield llm

    @pytest.fixture(scope="class")
    @classmethod
    def compiler(cls, llm: LLM) -> GrammarCompiler:
        return load_compiler(cls.reader.compiler, Source.of(llm.engine.renderer))

    @pytest.fixture
    def matcher(
        self, llm: LLM, compiler: GrammarCompiler, case: tuple[Mapping[str, Any], str]
    ) -> Matcher:
        """At the beginning of a case's grammar."""
        kinds = {name: value for name, value in case[0].items() if name != "disable_any_whitespace"}
        [(kind, value)] = kinds.items()
        wish = Wish("structured_outputs", kind, value, any_whitespace=len(kinds) == len(case[0]))
        return compiler.compile(
            self.reader(compiler.source, llm.engine.renderer).read(wish).grammar
        )

    # The two halves

    def test_the_half_that_reads_imports_no_torch(self) -> None:
        code = f"import sys, {self.reader.__module__}; sys.exit('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )  # nosec B603 # our own words
        assert done.returncode == 0, done.stderr or f"{self.reader.__module__} imports torch"

    def test_a_token_is_allowed_where_it_can_be_consumed(
        self, compiler: GrammarCompiler, matcher: Matcher
    ) -> None:
        generator = Random(3)  # nosec B311
        for _ in range(6):
            allowed = allowed_tokens(matcher, compiler.size)
            assert allowed, "nothing may follow"
            some = {
                *generator.sample(range(compiler.size), min(compiler.size, 40)),
                *generator.sample(allowed, min(len(allowed), 10)),
            }
            for token in some.difference(compiler.source.eos_token_ids):
                assert (token in allowed) == self.can_consume(matcher.copy(), token), (
                    f"the mask is wrong about token {token}"
                )
            inner = [token for token in allowed if token not in compiler.source.eos_token_ids]
            if not inner:
                assert matcher.is_stopped, "nothing but the end can follow"
                return
            assert not matcher.is_stopped, "more than the end can follow"
            matcher.consume(generator.choice(inner))

    @staticmethod
    def can_consume(matcher: Matcher, token: int) -> bool:
        try:
            matcher.consume(token)
        except ValueError:
            return False
        return True

    def test_what_is_forced_is_all_that_is_allowed(
        self, compiler: GrammarCompiler, matcher: Matcher
    ) -> None:
        generator = Random(4)  # nosec B311
        for _ in range(12):
            for token in [] if matcher.is_stopped else matcher.forced():
                assert allowed_tokens(matcher, compiler.size) == [token], (
                    f"{token} is forced, and others are allowed"
                )
                matcher.consume(token)
            inner = [
                token
                for token in allowed_tokens(matcher, compiler.size)
                if token not in compiler.source.eos_token_ids
            ]
            if not inner:
                return
            matcher.consume(generator.choice(inner))

    def test_masks_of_several_are_those_of_each(
        self, compiler: GrammarCompiler, matcher: Matcher
    ) -> None:
        generator = Random(5)  # nosec B311
        several = [matcher.copy() for _ in range(4)]
        for answer in several[1:]:
            inner = [
                token
                for token in allowed_tokens(answer, compiler.size)
                if token not in compiler.source.eos_token_ids
            ]
            answer.consume(generator.choice(inner))
        masks, alone = np.zeros((2, 4, -(-compiler.size // 32)), np.int32)
        compiler.fill(several, masks)
        for answer, mask in zip(several, alone, strict=True):
            answer.fill(mask)
        assert (masks == alone).all()

    def test_a_copy_goes_its_own_way(self, compiler: GrammarCompiler, matcher: Matcher) -> None:
        before = allowed_tokens(matcher, compiler.size)
        other = matcher.copy()
        other.consume(next(token for token in before if token not in compiler.source.eos_token_ids))
        assert allowed_tokens(matcher, compiler.size) == before

    def test_lengths_of_tokens(self, compiler: GrammarCompiler) -> None:
        lengths = compiler.token_lengths
        assert lengths is None or len(lengths) == compiler.size

    # Through the engine

    def test_what_comes_is_what_was_asked_for(
        self, llm: LLM, case: tuple[Mapping[str, Any], str]
    ) -> None:
        for answer in generate_structured(llm, case[0], n=4):
            assert answer.finish_reason == "stop" and re.fullmatch(case[1], answer.text), (
                answer.text
            )

    def test_documents_with_white_space_are_valid(self, llm: LLM) -> None:
        for answer in generate_structured(llm, {"json": SCHEMA}, n=4):
            if answer.finish_reason == "stop":
                assert re.fullmatch(
                    DOCUMENT, json.dumps(json.loads(answer.text), ensure_ascii=False)
                ), answer.text
            assert answer.text.startswith("{")

    def test_what_is_wrong_is_refused(self, llm: LLM, refused: Mapping[str, Any]) -> None:
        with pytest.raises(RequestError) as error:
            generate_structured(llm, refused)
        assert error.value.param == "structured_outputs"

    def test_a_bomb_is_answered_in_time(self, llm: LLM, bomb: Mapping[str, Any]) -> None:
        begun = time.monotonic()
        params = [
            SamplingParams(structured_outputs=dict(asked), max_tokens=40, seed=1)
            for asked in (bomb, {"choice": ["b"]})
        ]
        try:
            outputs = llm.generate(["a", "a"], params, use_tqdm=False)
        except RequestError as error:
            assert error.param == "structured_outputs"
            outputs = llm.generate(["a"], params[1:], use_tqdm=False)
        assert time.monotonic() - begun < SECONDS
        assert outputs[-1].outputs[0].text == "b"
        assert "plugin" not in (outputs[0].error or "")

    def test_the_end_has_the_last_word(self, llm: LLM) -> None:
        [answer] = generate_structured(llm, {"choice": ["yes"]}, min_tokens=20, max_tokens=40)
        assert (answer.text, answer.finish_reason) == ("yes", "stop")

    @pytest.mark.parametrize(
        "asked", [{"choice": ["yes"]}, {"regex": "[a-z]{1,2000}"}], ids=["stopped", "open"]
    )
    def test_after_the_end_nothing_comes(self, llm: LLM, asked: Mapping[str, Any]) -> None:
        ends = llm.engine.renderer.eos_token_ids
        [answer] = generate_structured(
            llm, asked, ignore_eos=True, max_tokens=12, logit_bias=dict.fromkeys(ends, 100.0)
        )
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 12)
        first = next(place for place, token in enumerate(answer.token_ids) if token in ends)
        assert set(answer.token_ids[first:]) <= set(ends)

    def test_special_tokens_are_no_text(self, llm: LLM) -> None:
        """They would vanish from the text: a string would be shorter than it must be."""
        special = {
            token: 50.0 for token in range(4) if token not in llm.engine.renderer.eos_token_ids
        }
        for answer in generate_structured(llm, {"regex": "[^a-z]{5}"}, n=3, logit_bias=special):
            assert len(answer.text) == 5

    def test_the_batch_and_preemption_change_nothing(self, llm: LLM) -> None:
        wanted: list[dict[str, Any] | None] = [
            {"json": SCHEMA},
            {"regex": "[a-z ]{20,40}"},
            {"choice": ["a long choice of words"]},
            None,
        ]
        prompts = _PROMPTS * 2
        params = [
            SamplingParams(max_tokens=40, seed=5, temperature=1.2, structured_outputs=answer)
            for answer in wanted * 2
        ]

        def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert not any(output.error for output in outputs)
            return [list(output.outputs[0].token_ids) for output in outputs]

        alone = [
            tokens
            for prompt, request_params in zip(prompts, params, strict=True)
            for tokens in run(llm, [prompt], [request_params])
        ]
        assert run(llm, prompts, params) == alone
        with self.engine(**_TIGHT) as other:
            assert run(other, prompts, params) == alone
