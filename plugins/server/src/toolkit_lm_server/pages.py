"""Pages of lists, as OpenAI's API has them: a part after a cursor, which is the id of an entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from toolkit_lm_server.errors import ApiError, printable
from toolkit_lm_server.schema_texts import Described

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100, description="Most entries of a page.")]
After = Annotated[str | None, Query(description="The id of the entry before the page.")]
InOrder = Annotated[Order, Query(description="The order of entries: the newest first, or last.")]


class PageEnds(Described):
    object: Literal["list"]
    """The kind of object."""
    first_id: str | None
    """The id of the first entry of the page. null: the page is empty."""
    last_id: str | None
    """The id of the last entry of the page, the cursor of the next page."""
    has_more: bool
    """More entries follow."""


def page_of(
    entries: Sequence[dict[str, Any]], limit: int, after: str | None, order: Order
) -> dict[str, Any]:
    """The page of a list. `entries`: the oldest first. Raises ApiError (400) for a cursor that no
    entry has."""
    found = [*entries] if order == "asc" else [*reversed(entries)]
    if after is not None:
        place = next((i for i, entry in enumerate(found) if entry["id"] == after), None)
        if place is None:
            raise ApiError(
                400, f"after: the list has no entry with id {printable(after)!r}.", param="after"
            )
        found = found[place + 1 :]
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > len(page),
    }
