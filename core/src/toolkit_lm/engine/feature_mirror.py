"""Multimodal data, which a front sends once: the front's mirror of what the engine holds, and the
engine's side of it.

The front decides. Each of its messages names the items that the engine must forget, so both sides
agree whenever a message has arrived.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from threading import Lock

from msgspec.structs import replace

from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, EngineRequest, MultiModalFeatureSpec
from toolkit_lm.processing.pinned_rendering import CURRENT
from toolkit_lm.renderer.feature_lookup import HeldFeature

_OVERHEAD = 1024
"""Bytes counted per item in addition to its data, on both sides. They bound the number of tiny
items."""


class FeatureMirror:
    """A front's side: the items that the engine holds for it, least recently used first. It has
    none of the data.

    The class is a FeatureLookup. `get` and `held_keys` may be called from any thread, other methods
    only from the sending one. The order of use changes only when something is sent. Otherwise a
    request without an item's data could overtake the request that brings it.
    """

    def __init__(self, budget: int) -> None:
        """`budget`: bytes that the engine may hold. Pinned items may exceed it for a while. 0:
        nothing is held."""
        self.budget = budget
        self.num_bytes = 0
        self._held: OrderedDict[str, HeldFeature] = OrderedDict()
        self._pins: Counter[str] = Counter()
        self._unpinned: deque[str] = deque()
        """Pins that have ended, in a thread or the garbage collector. Appending takes no lock."""
        self._forgotten: set[str] = set()
        """Identifiers that the engine must still be sent as forgotten."""
        self._lock = Lock()

    def get(self, identifier: str) -> HeldFeature | None:
        """Returns the held item of an identifier. For use during rendering: only then is the item
        pinned."""
        if (rendering := CURRENT.get()) is None:
            return None
        identifier = rendering.name(identifier)
        with self._lock:
            self._unpin()
            if (held := self._held.get(identifier)) is not None:
                self._pins[identifier] += 1
                rendering.add(identifier, held, partial(self._unpinned.append, identifier))
            return held

    def held_keys(self, limit: int) -> list[str]:
        """Identifiers used last, newest first. Empty for a rendering with a salt, whose items have
        other identifiers."""
        if (rendering := CURRENT.get()) is not None and rendering.salt:
            return []
        with self._lock:
            return list(islice(reversed(self._held), limit))

    def lacks(self, request: EngineRequest) -> bool:
        """Whether the request relies on data that the engine does not hold, since it was rendered
        for another engine."""
        return any(
            feature.data is None and feature.mm_identifier not in self._held
            for feature in request.features
        )

    @contextmanager
    def sending(
        self, requests: Sequence[EngineRequest]
    ) -> Iterator[tuple[list[EngineRequest], list[str]]]:
        """Context that yields the requests to send in place of `requests`, and the items that the
        engine forgets afterwards.

        After the block the requests count as sent, and `requests` keep no data; after an error they
        do not. Raises RequestError, without changes.
        """
        with self._lock:
            self._unpin()
            used: dict[str, HeldFeature] = {}
            evicted = dict.fromkeys(self._forgotten)
            sent = [
                replace(request, features=self._sent(request, used, evicted))
                if request.features
                else request
                for request in requests
            ]
            evicted = {name: None for name in evicted if name not in used}
            size = self.num_bytes + sum(
                feature.num_bytes for name, feature in used.items() if name not in self._held
            )
            for name in chain((name for name in self._held if name not in used), used):
                if size <= self.budget:
                    break
                if name not in self._pins:
                    evicted[name] = None
                    size -= (used.get(name) or self._held[name]).num_bytes
            yield sent, list(evicted)
            for name, held in used.items():
                self._held[name] = held
                self._held.move_to_end(name)
            for name in evicted:
                self._held.pop(name, None)
            self.num_bytes = size
            self._forgotten.clear()
        for request in requests:
            if request.features:
                request.features = [replace(feature, data=None) for feature in request.features]

    def _sent(
        self, request: EngineRequest, used: dict[str, HeldFeature], evicted: dict[str, None]
    ) -> list[MultiModalFeatureSpec]:
        """Returns a request's features, without the data that the engine holds. Adds to the used
        items, and to those that must not be kept."""
        features = []
        for number, feature in enumerate(request.features, 1):
            name = feature.mm_identifier
            place = feature.mm_position
            size = _OVERHEAD + (_num_bytes(feature.data) if feature.data is not None else 0)
            found = HeldFeature(
                request.prompt_token_ids[place.offset : place.end], place.mask, feature.layout, size
            )
            held = used.pop(name, None) or self._held.get(name)
            if held is not None:
                if held[:3] != found[:3]:
                    raise RequestError(
                        f"item {number}, {feature.modality}, has the identifier {name!r} of "
                        "another item.",
                        "prompt",
                    )
                used[name] = held
                feature = replace(feature, data=None)
            elif feature.data is None:
                raise RequestError(
                    f"item {number}, {feature.modality}: the engine does not hold the data of "
                    f"{name!r}.",
                    "prompt",
                )
            elif size <= self.budget:
                used[name] = found
            else:
                evicted[name] = None
            features.append(feature)
        return features

    def forget(self, identifiers: Iterable[str]) -> None:
        """Forgets items that the engine reports as missing."""
        with self._lock:
            for name in identifiers:
                if held := self._held.pop(name, None):
                    self.num_bytes -= held.num_bytes
                self._forgotten.add(name)

    def _unpin(self) -> None:
        while self._unpinned:
            name = self._unpinned.popleft()
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]


class EngineFeatures:
    """The engine's side: the data of the items in its fronts' mirrors. An item stays as long as one
    of them names it."""

    def __init__(self) -> None:
        self._data: dict[str, dict[str, Array]] = {}
        self._fronts: dict[int, set[str]] = {}

    def fill(
        self, front: int, requests: Iterable[EngineRequest], evicted: Iterable[str]
    ) -> dict[str, list[str]]:
        """Gives the features of a message's requests their data. Returns the missing identifiers by
        request, which must be sent again."""
        names = self._fronts.setdefault(front, set())
        missing: dict[str, list[str]] = {}
        for request in requests:
            for feature in request.features:
                name = feature.mm_identifier
                if feature.data is not None:
                    names.add(name)
                    if name not in self._data:
                        self._data[name] = _alone(feature.data)
                elif name not in names:
                    missing.setdefault(request.request_id, []).append(name)
            if request.features:
                request.features = [
                    replace(feature, data=self._data.get(feature.mm_identifier))
                    for feature in request.features
                ]
        self._forget(names, evicted)
        return missing

    def leave(self, front: int) -> None:
        """Releases the items of a front that has gone."""
        self._forget(set(), self._fronts.pop(front, set()))

    def _forget(self, names: set[str], evicted: Iterable[str]) -> None:
        for name in evicted:
            names.discard(name)
            if not any(name in others for others in self._fronts.values()):
                self._data.pop(name, None)


def _num_bytes(data: dict[str, Array]) -> int:
    return sum(array.data.nbytes for array in data.values())


def _alone(data: dict[str, Array]) -> dict[str, Array]:
    """Copies data that would otherwise keep a message of more than twice its size in memory."""
    size = _num_bytes(data)
    return {
        name: array
        if memoryview(array.data.obj).nbytes <= 2 * size
        else replace(array, data=memoryview(bytes(array.data)))
        for name, array in data.items()
    }
