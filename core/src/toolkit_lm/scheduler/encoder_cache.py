"""EncoderCache: which items of media the runner holds the embeddings of, and which a step
encodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Collection

from toolkit_lm.kv.group_blocks import TokenRange
from toolkit_lm.messages import EncoderItem, MultiModalFeatureSpec, StepPlan
from toolkit_lm.scheduler.planner import Planner
from toolkit_lm.scheduler.request import Request


class EncoderCache(Planner):
    """Accounts in embeddings, one for each token that one replaces. What is not there yet ends a
    chunk before it.

    A request holds the items in which its next chunk begins, and none while it waits. So those that
    hold some can go on, and give them back: whoever has started can finish. What nobody holds stays
    until others need the room, the longest unused first.
    """

    def __init__(self, capacity: int, per_step: int, *, whole_items: bool = False) -> None:
        """`per_step`: embeddings that a step makes at most, unless they are of one item.
        `whole_items`: no chunk ends inside an item."""
        self.capacity = capacity
        self.per_step = per_step
        self.whole_items = whole_items
        self._sizes: dict[str, int] = {}
        """By identifier, in the order of last use."""
        self._held: dict[str, dict[str, int]] = {}
        """By request, the items that it holds."""
        self._in_step: set[str] = set()
        """Items that the planned step reads."""
        self._encoded = 0
        """Embeddings that the planned step makes."""
        self._dropped: list[str] = []
        self.in_use = False
        """`take_dropped` has something to tell."""

    def end_of(self, request: Request) -> int:
        return request.media_end

    def take_dropped(self) -> list[str]:
        """A step is planned: what the runner is to forget before it encodes anything."""
        self.in_use = False
        self._in_step.clear()
        self._encoded = 0
        dropped, self._dropped = self._dropped, []
        return dropped

    def fit(self, request: Request, ranges: Collection[TokenRange]) -> list[TokenRange]:
        """What of these the next step can compute: up to the first item that has no room in the
        cache, or in the step."""
        if all(one.start >= request.media_end for one in ranges):
            return list(ranges)
        read: dict[str, int] = {}
        fitting = []
        for one in ranges:
            end = self._end(request, one, read)
            if end > one.start and (end == one.end or request.chunkable):
                fitting.append(one._replace(end=end))
        return fitting

    def _end(self, request: Request, one: TokenRange, read: dict[str, int]) -> int:
        """`read`: items that the step reads for it; more are added."""
        for feature in touched(request.features, one):
            place = feature.mm_position
            name = feature.mm_identifier
            cut = self.whole_items and one.end < place.end
            if cut or not self._has_room(name, place.num_embeds, read):
                return max(one.start, place.offset)
            read[name] = place.num_embeds
        return one.end

    def _has_room(self, name: str, size: int, read: dict[str, int]) -> bool:
        needed = {**read, name: size, **{one: self._sizes[one] for one in self._in_step}}
        for held in self._held.values():
            needed |= held
        encoded = self._encoded + sum(
            count for one, count in read.items() if one not in self._sizes
        )
        fits_step = (
            name in self._sizes or name in read or encoded == 0 or encoded + size <= self.per_step
        )
        return fits_step and sum(needed.values()) <= self.capacity

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> None:
        """Adds to a plan what these ranges, which `fit`, need encoded."""
        if all(one.start >= request.media_end for one in ranges):
            return
        self.in_use = True
        held = self._held.setdefault(request.request_id, {})
        # None of them makes room for another.
        self._in_step.update(
            feature.mm_identifier for one in ranges for feature in touched(request.features, one)
        )
        for one in ranges:
            for feature in touched(request.features, one):
                name = feature.mm_identifier
                size = feature.mm_position.num_embeds
                if name not in self._sizes:
                    self._make_room(size)
                    self._encoded += size
                    plan.encode.append(EncoderItem(name, feature.modality, feature.data or {}))
                self._sizes[name] = self._sizes.pop(name, size)
                if feature.mm_position.end > one.end:
                    held[name] = size
                else:
                    held.pop(name, None)

    def _make_room(self, size: int) -> None:
        kept = self._in_step.union(*self._held.values())
        total = sum(self._sizes.values())
        for name in [one for one in self._sizes if one not in kept]:
            if total + size <= self.capacity:
                return
            total -= self._sizes.pop(name)
            self._dropped.append(name)

    def release(self, request_id: str) -> None:
        """A request has ended, or waits."""
        self._held.pop(request_id, None)

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Nothing that the runner holds can be relied on, and what these plans drop it may still
        hold."""
        self.in_use = True
        self._dropped += [name for plan in plans for name in plan.dropped_items]
        self._dropped += self._sizes
        self._sizes.clear()
        self._held.clear()
        self._in_step.clear()
        self._encoded = 0


def touched(
    features: Iterable[MultiModalFeatureSpec], tokens: TokenRange
) -> Iterator[MultiModalFeatureSpec]:
    """Those that have tokens among these."""
    return (
        one
        for one in features
        if one.mm_position.offset < tokens.end and tokens.start < one.mm_position.end
    )
