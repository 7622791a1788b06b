"""POST /slots/{slot}: the prompts of slots, kept on disk under the names of files.

A slot is a number by which requests are told apart. Its content is the newest prompt with its
answer, of the requests to /completion that named the slot; those that name none are the slot 0's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import Query, Request
from pydantic import ConfigDict
from toolkit_lm.errors import RequestError
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.route import request_context
from toolkit_lm_server.schema_texts import Described


class SlotBody(Described):
    """The body of POST /slots/{slot}."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"filename": "slot.bin"}]})

    filename: str = ""
    """For save and restore: a plain name, and no path."""


class SlotTimings(Described):
    save_ms: float | None = None
    """Time until all was on disk."""
    restore_ms: float | None = None
    """Time of the restoring."""


class SlotAnswer(Described):
    """Answer of POST /slots/{slot}."""

    id_slot: int
    filename: str | None = None
    n_saved: int | None = None
    """Tokens that are on disk now."""
    n_written: int | None = None
    """Their bytes."""
    n_restored: int | None = None
    """Tokens that the next request with this prompt finds."""
    n_read: int | None = None
    """Their bytes, which are read with this request."""
    n_erased: int | None = None
    """Tokens that the slot had."""
    timings: SlotTimings | None = None


class _Content(NamedTuple):
    """What the newest request of a slot has computed."""

    token_ids: list[int]
    """Empty where the slot was restored: the disk has no tokens."""
    num_tokens: int
    model: str | None = None
    cache_salt: str | None = None


class Slots:
    """The contents of slots, and where they are kept."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api
        engine = api.engines[None]
        named = engine.processor.parts.by_name.get("kv_disk")
        self._saver: Any = None
        # The routes of operators write to disk.
        if api.options.admin_routes and named is not None:
            self._saver = named.saver(engine, api)  # type: ignore[attr-defined]
        self._contents: dict[int, _Content] = {}

    def remember(
        self,
        slot: int,
        token_ids: Sequence[int],
        model: str | None,
        cache_salt: str | None,
    ) -> None:
        """A request with these tokens of prompt and answer has ended."""
        number = max(slot, 0)
        if self._saver is not None and number < self._total:
            most = self._api.engines[None].config.max_model_len - 1
            kept = list(token_ids[:most])
            self._contents[number] = _Content(kept, len(kept), model, cache_salt)

    async def change(
        self,
        slot: int,
        request: Request,
        body: SlotBody | None = None,
        action: Annotated[str, Query()] = "",
    ) -> SlotAnswer:
        """Saves a slot's content to disk, restores or erases it."""
        if action not in ("save", "restore", "erase"):
            raise ApiError(400, "action must be save, restore or erase.", param="action")
        if self._saver is None:
            raise ApiError(
                501,
                f"slot {slot}: {action} needs a KV tier on disk (kv_disk.dir) and the routes for "
                "operators (admin_routes). The prefix cache finds prefixes by itself.",
                param="action",
            )
        if not 0 <= slot < self._total:
            raise ApiError(400, f"There is no slot {slot}: they are 0 to {self._total - 1}.")
        if action == "erase":
            content = self._contents.pop(slot, None)
            return SlotAnswer(id_slot=slot, n_erased=0 if content is None else content.num_tokens)
        begin = time.monotonic()
        name = "" if body is None else body.filename
        if action == "save":
            return await self._save(slot, name, request_context(request))
        prefix = await self._find(name)
        self._contents[slot] = _Content([], prefix.num_tokens)
        return SlotAnswer(
            id_slot=slot,
            filename=name,
            n_restored=prefix.num_tokens,
            n_read=prefix.num_bytes,
            timings=SlotTimings(restore_ms=(time.monotonic() - begin) * 1000),
        )

    async def _save(self, slot: int, name: str, context: dict[str, str]) -> SlotAnswer:
        content = self._contents.get(slot)
        if content is None or not content.token_ids:
            raise ApiError(400, f"Slot {slot} has no tokens: ask /completion with id_slot {slot}.")
        how = {"model": content.model, "cache_salt": content.cache_salt}
        fields: dict[str, Any] = {"prompt": content.token_ids}
        fields |= {field: value for field, value in how.items() if value is not None}
        try:
            saved = await self._saver.save(name, fields, context)
        except RequestError as error:
            raise RequestError(str(error), "filename") from error
        return SlotAnswer(
            id_slot=slot,
            filename=name,
            n_saved=saved.prefix.num_tokens,
            n_written=saved.prefix.num_bytes * saved.num_ranks,
            timings=SlotTimings(save_ms=saved.seconds * 1000),
        )

    async def _find(self, name: str) -> Any:
        """The prefix with a name. Raises ApiError for one that is not there, or not whole."""
        prefixes = (await self._saver.prefixes()).prefixes
        prefix = next((prefix for prefix in prefixes if prefix.name == name), None)
        if prefix is None:
            raise ApiError(400, f"There is no saved slot {name[:80]!r}.", param="filename")
        if not prefix.is_complete:
            raise ApiError(400, f"{name!r} is damaged: save it anew.", param="filename")
        return prefix

    @property
    def _total(self) -> int:
        return self._api.engines[None].config.scheduler.max_num_seqs
