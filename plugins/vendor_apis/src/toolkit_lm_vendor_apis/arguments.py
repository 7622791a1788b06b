"""Arguments of calls, which chats have as a text."""

from __future__ import annotations

import json
from typing import Any


def dumps(arguments: Any) -> str:
    """JSON of a call's arguments, in the form that chat templates write. Lone surrogates stay in
    it: the renderer refuses them, like in any text."""
    return json.dumps(arguments, ensure_ascii=False)
