"""Saver: computes prompts, and gives their prefixes names in the tier on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit_lm.errors import RequestError
from toolkit_lm_server.errors import ApiError, validated

from toolkit_lm_kv_disk.folders import of_rank
from toolkit_lm_kv_disk.named import NAME
from toolkit_lm_kv_disk.segments import read_all
from toolkit_lm_kv_disk.share import PART, Drop, OnDisk, Prefix, Prefixes, Saved, context_of

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine

_POLL_SECONDS = 0.01
_WRITING = 120.0
"""Most seconds that a prefix takes to be written, once the tier has it."""


class Written(NamedTuple):
    """A prefix that is on disk."""

    prefix: Prefix
    num_prompt_tokens: int
    num_cached: int
    """Number of the prompt's tokens that were not computed."""
    seconds: float
    num_ranks: int


class Saver:
    """Saves prefixes of one served model."""

    def __init__(self, engine: ServingEngine, api: OpenAIApi) -> None:
        self._engine = engine
        self._api = api
        self._busy: set[str] = set()
        """Names that are being saved."""

    async def save(
        self, name: str, fields: Mapping[str, Any], context: Mapping[str, str]
    ) -> Written:
        """Computes a prompt, and returns once its prefix is on disk under the name. `fields`: those
        of a chat completion if there are `messages`, else of a plain completion. `context`: facts
        of the HTTP request.

        Raises RequestError and ApiError.
        """
        checked_name(name)
        if name in self._busy:
            raise ApiError(400, f"The prefix {name!r} is being saved.", param="name")
        self._busy.add(name)
        begin = time.monotonic()
        try:
            usage = await self._compute(name, fields, context)
            prefix = await self._named(name)
            num_ranks = await self._wait_for_disk(name)
        finally:
            self._busy.discard(name)
        return Written(
            prefix,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            time.monotonic() - begin,
            num_ranks,
        )

    async def _compute(
        self, name: str, fields: Mapping[str, Any], context: Mapping[str, str]
    ) -> dict[str, Any]:
        """Computes the prompt. Returns the usage."""
        own = {**context, **context_of(name, fields.get("cache_salt"))}
        asked = {**fields, "max_tokens": 1, "temperature": 0, "n": 1}
        if "messages" in fields:
            chat = self._api.chat
            answer = await chat.begin(validated(chat.body, asked), own)
            await answer.choices()
            return answer.usage()
        completions = self._api.completions
        generation = await completions.begin(validated(completions.body, asked), own)
        await generation.choices()
        return generation.usage()

    async def _named(self, name: str) -> Prefix:
        """Waits until the tier has the prefix. Raises RequestError and ApiError."""
        while True:
            found = await self._engine.call_workers(f"{PART}.saved", name, Saved)
            answer = next((each for each in found if each.state != "unknown"), Saved("unknown"))
            if answer.prefix is not None:
                return answer.prefix
            if answer.state == "refused":
                raise RequestError(f"the prefix {name!r} is not saved: {answer.reason}.", "name")
            if answer.state == "unknown":
                raise ApiError(503, f"The prefix {name!r} was not saved: the engine has failed.")
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_disk(self, name: str) -> int:
        """Waits until all ranks have written a prefix. Returns their number. Raises ApiError, and
        the prefix has no name then."""
        places = await self._engine.call_workers(f"{PART}.on_disk", name, list[OnDisk])
        place = next((place for found in places for place in found), None)
        end = time.monotonic() + _WRITING
        while place is not None:
            begin = time.monotonic()
            if await asyncio.to_thread(_has_all, place):
                return place.num_ranks
            now = time.monotonic()
            if now > end:
                await self.drop(Drop(name))
                break
            await asyncio.sleep(max(_POLL_SECONDS, 2 * (now - begin)))
        raise ApiError(503, f"The prefix {name!r} could not be written to disk.")

    async def prefixes(self) -> Prefixes:
        """The named prefixes of all engines."""
        found = await self._engine.call_workers(f"{PART}.prefixes", None, Prefixes)
        return Prefixes(
            [prefix for each in found for prefix in each.prefixes],
            sum(each.num_bytes for each in found),
            sum(each.most_bytes for each in found),
        )

    async def drop(self, asked: Drop) -> list[Prefix]:
        """Drops named prefixes. Returns them."""
        found = await self._engine.call_workers(f"{PART}.drop_prefixes", asked, list[Prefix])
        return [prefix for dropped in found for prefix in dropped]

    async def reset_tier(self, name: str) -> None:
        """Forgets what a tier, or the device, has. Raises RequestError for an unknown name."""
        await self._engine.call_workers(f"{PART}.reset_tier", name, None)


def checked_name(name: str) -> str:
    """The name of a prefix. Raises RequestError for a path, among others."""
    if NAME.fullmatch(name) is None:
        raise RequestError(
            f"name: {name[:80]!r} is none: give letters, digits, '.', '_' and '-', 128 at most, "
            "with a letter or a digit first.",
            "name",
        )
    return name


def _has_all(place: OnDisk) -> bool:
    return all(
        set(place.keys) <= read_all(of_rank(Path(place.folder), rank), place.identity)[1].keys()
        for rank in range(place.num_ranks)
    )
