"""A front's mirror of the multimodal data that its engine holds. The state machine in this folder
goes further."""

from __future__ import annotations

import gc
import threading

import msgspec
import numpy as np
import pytest
from toolkit_lm.engine.feature_mirror import EngineFeatures, FeatureMirror
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, EngineRequest, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.renderer import Rendered

KIB = 1024


def request(*items: str, data: bool = True, size: int = KIB, **position) -> EngineRequest:
    features = []
    for number, item in enumerate(items):
        arrays = {"pixels": Array.of(np.full(size, ord(item) % 256, np.uint8))} if data else None
        place = PlaceholderRange(offset=2 * number, length=2, **position)
        features.append(
            MultiModalFeatureSpec(
                modality="image", mm_identifier=item, mm_position=place, data=arrays
            )
        )
    return EngineRequest(
        request_id="".join(items),
        prompt_token_ids=[7] * 99,
        params=SamplingParams(),
        features=features,
    )


def send(mirror: FeatureMirror, *requests: EngineRequest) -> tuple[list[str], list[str]]:
    """Items whose data is sent, and what the engine forgets."""
    with mirror.sending(requests) as (sent, evicted):
        carried = [
            feature.mm_identifier
            for one in sent
            for feature in one.features
            if feature.data is not None
        ]
    return carried, evicted


def pin(mirror: FeatureMirror, *items: str) -> PinnedRendering:
    def render() -> Rendered:
        assert all(mirror.get(item) is not None for item in items)
        return Rendered([1])

    rendering = PinnedRendering(render)
    rendering()
    return rendering


def test_the_longest_unused_is_evicted():
    mirror = FeatureMirror(6 * KIB)
    assert send(mirror, request("a", "b"), request("c", "a")) == (["a", "b", "c"], [])
    assert send(mirror, request("b", "d")) == (["d"], ["c"])
    assert mirror.held_keys(2) == ["d", "b"]
    assert mirror.held_keys(9) == ["d", "b", "a"]
    assert mirror.num_bytes == 6 * KIB


def test_what_is_larger_than_all_room_is_not_kept():
    mirror = FeatureMirror(6 * KIB)
    send(mirror, request("a", "b"))
    assert (
        send(mirror, request("L", size=8 * KIB))
        == send(mirror, request("L", size=8 * KIB))
        == (["L"], ["L"])
    )
    assert mirror.held_keys(9) == ["b", "a"]
    assert send(FeatureMirror(0), request("a", "b")) == (["a", "b"], ["a", "b"])


def test_only_a_rendering_finds_and_what_it_finds_stays():
    mirror = FeatureMirror(4 * KIB)
    send(mirror, request("a", "b"))
    assert mirror.get("a") is None, "nobody would give it back"
    rendering = pin(mirror, "a", "a")
    assert send(mirror, request("c")) == (["c"], ["b"])
    assert send(mirror, request("d", "e")) == (["d", "e"], ["c", "d"])
    rendering.release()
    rendering.release()
    assert send(mirror, request("f", "g")) == (["f", "g"], ["a", "e"])


def test_what_nobody_has_any_more_is_given_back():
    mirror = FeatureMirror(2 * KIB)
    send(mirror, request("a"))
    rendering = pin(mirror, "a")
    assert send(mirror, request("b")) == (["b"], ["b"])
    rendering.itself = rendering
    del rendering
    gc.collect()
    assert send(mirror, request("b")) == (["b"], ["a"])


def test_what_was_found_is_found_in_its_own_context_only():
    mirror = FeatureMirror(4 * KIB)
    found = []
    send(mirror, request("a"))

    def render() -> Rendered:
        other = threading.Thread(target=lambda: found.append(mirror.get("a")))
        other.start()
        other.join()
        found.append(mirror.get("a"))
        return Rendered([1])

    PinnedRendering(render)()
    assert found[0] is None
    assert found[1] is not None


def test_an_error_takes_it_back():
    mirror = FeatureMirror(4 * KIB)
    send(mirror, request("a", "b"))
    wanted = request("b", "c")
    with pytest.raises(KeyboardInterrupt), mirror.sending([wanted]):
        raise KeyboardInterrupt
    assert (mirror.held_keys(9), mirror.num_bytes) == (["b", "a"], 4 * KIB)
    assert all(one.data is not None for one in wanted.features)
    assert send(mirror, wanted) == (["c"], ["a"])
    assert all(one.data is None for one in wanted.features), "the front keeps none of it"


def test_what_is_wrong_is_refused_and_changes_nothing():
    mirror = FeatureMirror(8 * KIB)
    send(mirror, request("a"))
    for wrong, reason in (
        (request("b", data=False), "not hold the data"),
        (request("a", mask=[True, False]), "of another item"),
    ):
        with pytest.raises(RequestError, match=reason):
            send(mirror, request("c"), wrong)
        assert mirror.held_keys(9) == ["a"]
    other = request("a", data=False)
    other.prompt_token_ids = [8] * 99
    with pytest.raises(RequestError, match="of another item"):
        send(mirror, other)


def test_what_the_engine_has_lost_is_told_once_more():
    """It may hold it by then, by a message that was on its way."""
    mirror = FeatureMirror(8 * KIB)
    send(mirror, request("a", "b"))
    mirror.forget(["a", "b", "x"])
    assert mirror.num_bytes == 0
    carried, evicted = send(mirror, request("a"))
    assert (carried, sorted(evicted)) == (["a"], ["b", "x"])
    assert send(mirror, request("b")) == (["b"], [])


def test_tiny_items_do_not_pile_up():
    mirror = FeatureMirror(100 * KIB)
    for number in range(300):
        send(mirror, request(chr(1000 + number), size=0))
    assert len(mirror.held_keys(1000)) == 100


def test_a_small_item_does_not_keep_a_large_message():
    """Data is a view of the message that brought it. Alone in it, it is not copied."""

    def views(*requests: EngineRequest) -> list[memoryview]:
        message = msgspec.msgpack.encode(list(requests))
        arrived = msgspec.msgpack.decode(message, type=list[EngineRequest])
        engine = EngineFeatures()
        assert engine.fill(0, arrived, []) == {}
        for one in arrived:
            for feature in one.features:
                assert feature.data is engine._data[feature.mm_identifier]
                assert (
                    bytes(feature.data["pixels"].data)
                    == bytes([ord(feature.mm_identifier)]) * feature.data["pixels"].shape[0]
                )
        return [array.data for data in engine._data.values() for array in data.values()]

    (alone,) = views(request("a", size=4 * KIB))
    assert len(alone.obj) > 4 * KIB, "the message itself"
    assert [len(view.obj) for view in views(request("a", "b", "c", size=4 * KIB))] == [4 * KIB] * 3
    large, small = views(request("a", size=64 * KIB), request("b", size=KIB))
    assert len(large.obj) > 65 * KIB
    assert len(small.obj) == KIB


def test_fronts_share_data_and_see_their_own():
    engine = EngineFeatures()
    engine.fill(1, [request("a")], [])
    assert engine.fill(2, [request("a", data=False)], []) == {"a": ["a"]}, "it never sent it"
    engine.fill(2, [request("a", "b")], [])
    engine.fill(1, [], ["a"])
    wanted = request("a", data=False)
    assert engine.fill(2, [wanted], []) == {}
    assert wanted.features[0].data is not None
    engine.leave(2)
    assert not engine._data


def test_many_threads_render_while_one_sends():
    mirror = FeatureMirror(8 * KIB)
    engine = EngineFeatures()
    errors = []
    stop = threading.Event()

    def render_on() -> None:
        try:
            while not stop.is_set():
                for item in "abcdef":
                    PinnedRendering(
                        lambda item=item: Rendered([1 if mirror.get(item) is None else 2])
                    )()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=render_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(600):
        with mirror.sending([request(*(chr(97 + (number * k) % 7) for k in (1, 2, 3)))]) as (
            sent,
            evicted,
        ):
            assert engine.fill(0, sent, evicted) == {}
        assert engine._fronts[0] == set(mirror.held_keys(99))
    stop.set()
    for thread in threads:
        thread.join()
    send(mirror, request("z"))
    assert not errors
    assert not mirror._pins
    assert mirror.num_bytes <= mirror.budget
