"""Answers of render servers are checked before they are believed, and counted before they are
made."""

from __future__ import annotations

import time
import tracemalloc

import msgspec
import numpy as np
import pytest
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm_renderer_remote.reading import Answer, WrongAnswerError

ARRAY = {"dtype": "float32", "shape": [1, 2], "data": bytes(8)}
FEATURE = {
    "modality": "image",
    "mm_identifier": "a",
    "mm_position": {"offset": 1, "length": 2},
    "data": {"x": ARRAY},
}


def feature(**changed):
    return {**FEATURE, **changed}


def at(offset, length, mask=None):
    return feature(mm_position={"offset": offset, "length": length, "mask": mask})


def answer(*features, **changed):
    return {"token_ids": [5, 6, 7, 8], "features": list(features), **changed}


def as_json(value):
    return Answer(msgspec.json.encode(value), "application/json; charset=utf-8")


def as_msgpack(value):
    return Answer(msgspec.msgpack.encode(value), "application/msgpack")


def test_both_forms_are_read():
    features = [
        MultiModalFeatureSpec(
            modality="image",
            mm_identifier=str(i),
            mm_position=PlaceholderRange(2 * i, 2, [True, False]),
            data={
                "x": Array.of(np.full((2, 3), i, np.float32)),
                "empty": Array.of(np.zeros((0, 3), np.int64)),
            },
            layout={"grid": [1.0, 2.0]},
        )
        for i in range(2)
    ]
    for encoded in (as_json, as_msgpack):
        found = encoded(
            {"token_ids": [5, 6, 7, 8], "features": features, "unknown": {"a": 1}}
        ).prompt(2)
        assert found.token_ids == [5, 6, 7, 8]
        assert found.features == features
        assert found.features[1].data["x"].to_numpy().tolist() == [[1, 1, 1], [1, 1, 1]]
        assert (
            encoded({"token_ids": [5]}).prompt()
            == encoded({"token_ids": [5], "features": None}).prompt()
            == ([5], None)
        )
        assert encoded({"data": [{"token_ids": [5], "features": []}]}).only_prompt() == ([5], None)
        held = encoded(answer(feature(data=None))).prompt(1, ["a"])
        assert held.features[0].data is None


@pytest.mark.parametrize("encoded", [as_json, as_msgpack])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "not a rendered prompt"),
        ({}, "not a rendered prompt"),
        ({"token_ids": []}, "no token"),
        ({"token_ids": [0.5]}, "not a rendered prompt"),
        ({"token_ids": "abc"}, "not a rendered prompt"),
        ({"token_ids": {"a": 5}}, "not a rendered prompt"),
        (answer(FEATURE, at(3, 1)), "too much|2 features"),
        (answer(features={"a": 1}), "not a rendered prompt"),
        (answer(features=5), "not a rendered prompt"),
        (answer(5), "not a rendered prompt"),
        (answer(feature(mm_identifier="")), "identifier"),
        (answer(feature(mm_identifier="a" * 1000)), "identifier"),
        (answer(feature(modality="")), "modality"),
        (answer(feature(data=None)), "nobody holds"),
        (answer(at(-1, 2)), "outside"),
        (answer(at(0, 0)), "outside"),
        (answer(at(4, 1)), "outside"),
        (answer(at(3, 2)), "beyond"),
        (answer(at(0, 10**12)), "outside"),
        (answer(at(1, 2, [True])), "mask"),
        (answer(at(1, 2, [True] * 5000)), "too much"),
        (answer(at(1, 2, [1, 0])), "not a rendered prompt"),
        (answer(feature(data={"x": {**ARRAY, "dtype": "object"}})), "dtype"),
        (answer(feature(data={"x": {**ARRAY, "dtype": "O,f4"}})), "dtype"),
        (answer(feature(data={"x": {**ARRAY, "shape": [1, 3]}})), "as many bytes"),
        (answer(feature(data={"x": {**ARRAY, "shape": [-1, -2]}})), "as many bytes"),
        (answer(feature(data={"x": {**ARRAY, "shape": [2**62, 4]}})), "as many bytes"),
        (
            answer(feature(data={"x": {**ARRAY, "shape": [1] * 9 + [2]}})),
            "too much in a shape|too much is in a shape",
        ),
        (answer(feature(data={str(i): ARRAY for i in range(600)})), "too much"),
        (answer(feature(data=[ARRAY])), "not a rendered prompt"),
        (answer(feature(layout={str(i): [1.0] for i in range(5000)})), "too much|too large"),
        (answer(feature(layout={"a": ["x"]})), "not a rendered prompt"),
    ],
)
def test_what_is_wrong_is_found(encoded, value, told):
    with pytest.raises(WrongAnswerError, match=told):
        encoded(value).prompt(1)


@pytest.mark.parametrize("encoded", [as_json, as_msgpack])
@pytest.mark.parametrize(
    "value", [answer(), answer(features=None), {"token_ids": [5]}, answer(FEATURE)]
)
def test_no_item_is_left_out(encoded, value):
    with pytest.raises(WrongAnswerError, match="features for 2 items"):
        encoded(value).prompt(2)
    with pytest.raises(WrongAnswerError, match="features for 2 items"):
        encoded({"data": [value]}).only_prompt(2)


def test_parts_that_may_be_items_may_have_no_features():
    assert len(as_json(answer(FEATURE)).prompt(2, fewest=1).features) == 1
    assert as_json({"token_ids": [5]}).prompt(2, fewest=0).features is None


def test_features_are_in_order_and_apart():
    for features in ([at(2, 1), at(1, 1)], [at(0, 2), at(1, 1)]):
        with pytest.raises(WrongAnswerError, match="overlap"):
            as_json(answer(*features)).prompt(2)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"{}"),
        ("", b"{}"),
        ("application/json", b"{"),
        ("application/msgpack", b"\xdd\xff"),
    ],
)
def test_what_is_no_answer_at_all(kind, body):
    with pytest.raises(WrongAnswerError):
        Answer(body, kind).prompt()


_MANY = 2_000_000


@pytest.mark.parametrize(
    "made",
    [
        lambda: Answer(
            b'{"token_ids":[5],"features":[' + b"1," * _MANY + b"1]}", "application/json"
        ),
        lambda: Answer(
            b"\x82\xa9token_ids\x91\x05\xa8features\xdd"
            + _MANY.to_bytes(4, "big")
            + b"\x05" * _MANY,
            "application/msgpack",
        ),
        lambda: as_msgpack(answer(at(1, 2, [True] * _MANY))),
        lambda: as_json(answer(at(1, 2, [True] * _MANY))),
        lambda: as_msgpack(answer(feature(data={"x": {**ARRAY, "shape": [1] * _MANY}}))),
        lambda: as_json(answer(feature(layout={"x": [0] * _MANY}))),
        lambda: Answer(b'{"token_ids":' + b"[" * _MANY, "application/json"),
        lambda: Answer(b'{"a":' * 200_000, "application/json"),
    ],
)
def test_bombs_take_neither_time_nor_memory(made):
    bomb = made()
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(WrongAnswerError):
        bomb.prompt(1)
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2
    # Copies of the answer's own bytes, and no object for each item.
    assert peak < 40 * 2**20
