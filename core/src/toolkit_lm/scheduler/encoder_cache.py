"""EncoderCache: tracks the multimodal embeddings that the runner holds, and chooses the items that
a step encodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Collection

from toolkit_lm.kv.group_blocks import TokenRange
from toolkit_lm.messages import EncoderItem, MultiModalFeatureSpec, StepPlan
from toolkit_lm.scheduler.planner import Planner
from toolkit_lm.scheduler.request import Request


class EncoderCache(Planner):
    """Budget of the runner's multimodal embeddings, in embeddings: one per replaced token. A chunk
    ends before an item that has no room yet.

    A request holds the items in which its next chunk begins, and none while it waits. A request
    that holds items can therefore always finish and release them. Items without a holder stay until
    their room is needed, and the least recently used goes first.
    """

    def __init__(self, capacity: int, per_step: int, *, whole_items: bool = False) -> None:
        """`per_step`: most embeddings that a step computes, unless they belong to one item.
        `whole_items`: no chunk ends inside an item."""
        self.capacity = capacity
        self.per_step = per_step
        self.whole_items = whole_items
        self._sizes: dict[str, int] = {}
        """Number of embeddings by item identifier, least recently used first."""
        self._held: dict[str, dict[str, int]] = {}
        """Held items, by request."""
        self._in_step: set[str] = set()
        """Items that the planned step reads."""
        self._encoded = 0
        """Number of embeddings that the planned step computes."""
        self._dropped: list[str] = []
        self.in_use = False
        """Set if `drain_dropped` has items to return."""

    def end_of(self, request: Request) -> int:
        return request.media_end

    def drain_dropped(self) -> list[str]:
        """Returns the items that the runner must drop before it encodes, and ends the planned
        step."""
        self.in_use = False
        self._in_step.clear()
        self._encoded = 0
        dropped, self._dropped = self._dropped, []
        return dropped

    def fit(self, request: Request, ranges: Collection[TokenRange]) -> list[TokenRange]:
        """Returns the part of the ranges that the next step can compute: up to the first item
        without room in the cache or in the step."""
        if all(span.start >= request.media_end for span in ranges):
            return list(ranges)
        read: dict[str, int] = {}
        fitting = []
        for span in ranges:
            end = self._end(request, span, read)
            if end > span.start and (end == span.end or request.chunkable):
                fitting.append(span._replace(end=end))
        return fitting

    def _end(self, request: Request, span: TokenRange, read: dict[str, int]) -> int:
        """`read`: items that the step reads for the request; new ones are added."""
        for feature in touched(request.features, span):
            place = feature.mm_position
            name = feature.mm_identifier
            cut = self.whole_items and span.end < place.end
            if cut or not self._has_room(name, place.num_embeds, read):
                return max(span.start, place.offset)
            read[name] = place.num_embeds
        return span.end

    def _has_room(self, name: str, size: int, read: dict[str, int]) -> bool:
        needed = {**read, name: size, **{name: self._sizes[name] for name in self._in_step}}
        for held in self._held.values():
            needed |= held
        encoded = self._encoded + sum(
            count for name, count in read.items() if name not in self._sizes
        )
        fits_step = (
            name in self._sizes or name in read or encoded == 0 or encoded + size <= self.per_step
        )
        return fits_step and sum(needed.values()) <= self.capacity

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> None:
        """Adds the items of these ranges to the plan's encoder inputs. The ranges come from
        `fit`."""
        if all(span.start >= request.media_end for span in ranges):
            return
        self.in_use = True
        held = self._held.setdefault(request.request_id, {})
        # The request's own items are never evicted for one another.
        self._in_step.update(
            feature.mm_identifier for span in ranges for feature in touched(request.features, span)
        )
        for span in ranges:
            for feature in touched(request.features, span):
                name = feature.mm_identifier
                size = feature.mm_position.num_embeds
                if name not in self._sizes:
                    self._make_room(size)
                    self._encoded += size
                    plan.encode.append(EncoderItem(name, feature.modality, feature.data or {}))
                self._sizes[name] = self._sizes.pop(name, size)
                if feature.mm_position.end > span.end:
                    held[name] = size
                else:
                    held.pop(name, None)

    def _make_room(self, size: int) -> None:
        kept = self._in_step.union(*self._held.values())
        total = sum(self._sizes.values())
        for name in [name for name in self._sizes if name not in kept]:
            if total + size <= self.capacity:
                return
            total -= self._sizes.pop(name)
            self._dropped.append(name)

    def release(self, request_id: str) -> None:
        """Releases a request's items, when it has ended or is preempted."""
        self._held.pop(request_id, None)

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Forgets what the runner holds after a failure. Items that `plans` would have dropped may
        still be there."""
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
    """Yields the features that overlap the tokens."""
    return (
        feature
        for feature in features
        if feature.mm_position.offset < tokens.end and tokens.start < feature.mm_position.end
    )
