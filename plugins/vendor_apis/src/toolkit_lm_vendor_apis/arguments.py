"""Arguments of calls, which chats have as a text."""

from __future__ import annotations

import json
from typing import Any


def dumps(arguments: Any) -> str:
    """Their JSON, as chat templates write it. Halves of characters stay in it: the renderer refuses
    them, as in any text."""
    return json.dumps(arguments, ensure_ascii=False)
