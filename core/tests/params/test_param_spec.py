"""How parameters are stated, and what is made of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import (
    ProcessorParams,
    check_fields,
    checks_of,
    param,
    params_of,
    spec_of,
)
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams
from toolkit_lm.pooling_params import POOLING_PARAMS, PoolingParams


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    share: Annotated[float, param("A share.", gt=0, le=1)] = 0.5
    count: Annotated[int | None, param("A count.", ge=1, flag=False)] = None
    loud: Annotated[bool, param("Loud.", use="both")] = False
    color: Annotated[Literal["red", "green"], param("A color.")] = "red"
    when: Annotated[bool | Literal["never"], param("When.")] = False
    words: Annotated[list[str] | None, param("Words.", max_items=2, max_length=3)] = None
    text: Annotated[str | list[str] | None, param("One or several.")] = None
    tokens: Annotated[list[str | int] | None, param("Texts or ids.")] = None
    word: Annotated[str | None, param("One word.", max_length=3)] = None
    table: Annotated[dict[str, Any] | None, param("A table.", max_items=1)] = None


CHECKS = checks_of(Sample)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("share", "1", "share must be a finite number, not '1'."),
        ("share", True, "share must be a finite number, not True."),
        ("share", float("nan"), "share must be a finite number, not nan."),
        ("share", 0, "share must be above 0 and at most 1, not 0."),
        ("count", 1.0, "count must be an integer of at most 64 bits, not 1.0."),
        ("count", 0, "count must be at least 1, not 0."),
        ("loud", 1, "loud must be true or false, not 1."),
        ("color", "blue", 'color must be "red" or "green", not \'blue\'.'),
        ("when", "always", "when must be true, false or \"never\", not 'always'."),
        ("words", "ab", "words must be a list of texts, not 'ab'."),
        ("words", [1], "words must be a list of texts, not [1]."),
        ("words", [""], "words must be a list of texts, none of them empty, not ['']."),
        ("words", ["a"] * 3, "words must be at most 2 texts, not 3."),
        ("words", ["abcd"], "words must be texts of at most 3 characters, not 4."),
        ("text", 1, "text must be a text or a list of texts, not 1."),
        ("word", ["a"], "word must be a text, not ['a']."),
        ("word", "abcd", "word must be a text of at most 3 characters, not 4."),
        ("tokens", [-1], "tokens must be a list of texts or token ids, not [-1]."),
        ("table", [], "table must be a mapping, not []."),
        ("table", {"a": 1, "b": 2}, "table must be a mapping of at most 1 entries, not 2."),
    ],
)
def test_a_wrong_value_is_told_with_its_parameter(name, value, message):
    with pytest.raises(RequestError) as error:
        check_fields(Sample(**{name: value}), CHECKS)
    assert (str(error.value), error.value.param) == (message, name)


def test_values_within_the_bounds_pass():
    check_fields(Sample(), CHECKS)
    check_fields(
        Sample(
            share=1,
            count=1,
            loud=True,
            color="green",
            when="never",
            words=["a", "abc"],
            text="a",
            tokens=["a", 5],
            word="abc",
        ),
        CHECKS,
    )
    check_fields(Sample(when=True, words=[], text=["a"], tokens=(), table={"a": None}), CHECKS)


def test_what_is_stated_besides():
    stated = {name: spec_of(o) for name, o in params_of(Sample).items()}
    assert [name for name, spec in stated.items() if not spec.flag] == ["count"]
    assert [name for name, spec in stated.items() if spec.use == "both"] == ["loud"]


@pytest.mark.parametrize(
    ("struct", "stated"), [(SamplingParams, SAMPLING_PARAMS), (PoolingParams, POOLING_PARAMS)]
)
def test_every_field_is_stated_with_a_sentence(struct, stated):
    # In Python the caller decides what a request's outputs contain.
    assert tuple(stated) == tuple(
        name for name in struct.__struct_fields__ if name != "output_kind"
    )
    for o in stated.values():
        assert o.help[0].isupper() and o.help.endswith("."), o.name
        assert o.default == getattr(struct(), o.name)


def test_a_type_that_cannot_be_checked_is_an_error():
    class Odd(msgspec.Struct):
        odd: Annotated[bytes, param("Odd.")] = b""

    with pytest.raises(TypeError, match="odd is neither a number, a switch, a text"):
        checks_of(Odd)


class Shout(ProcessorParams):
    shout: Annotated[float, param("Shout.", ge=0, le=1)] = 0.0
    words: Annotated[list[str] | None, param("Words.")] = None


def test_the_parameters_of_a_logits_processor():
    assert Shout(shout=1).prepare(None) == {"shout": 1, "words": None}
    with pytest.raises(RequestError, match=r"shout must be between 0 and 1, not 2\.") as error:
        Shout(shout=2)
    assert error.value.param == "shout"
