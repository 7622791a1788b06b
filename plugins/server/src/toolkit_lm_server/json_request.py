"""A request's JSON, with bounds."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import numpy as np
from fastapi import Request

MAX_DEPTH = 100
"""Levels that JSON may be nested. Python bounds its recursion, and what reads a value may need several calls for each level."""


class JsonRequest(Request):
    """A request whose JSON is UTF-8, has no NaN or infinity, and is not nested too deeply."""

    async def json(self) -> Any:
        """Raises JSONDecodeError, and ValueError for an integer with thousands of digits."""
        body = await self.body()
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth(body) > MAX_DEPTH:
            raise _invalid(f"it is nested more than {MAX_DEPTH} levels deep")
        try:
            text = body.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _invalid("it is not UTF-8") from error
        return json.loads(text, parse_constant=_no_constant)


def depth(body: bytes) -> int:
    """How many levels JSON is nested. Anything is returned for what is no JSON."""
    # Without escaped characters, each quotation mark begins or ends a text.
    bare = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    # Only the last bit counts, so it may overflow.
    structure = bare[np.cumsum(bare == ord('"'), dtype=np.uint8) & 1 == 0]
    opens = (structure == ord("[")) | (structure == ord("{"))
    closes = (structure == ord("]")) | (structure == ord("}"))
    levels: int = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32).max(initial=0)
    return levels


def _no_constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not a number in JSON")


def _invalid(why: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(why, "", 0)
