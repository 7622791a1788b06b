"""At the front: which adapter a request names, by the digest of its file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.processing import RequestHalf


class LoraRequests(RequestHalf):
    """The share of a request: (name, digest). Cached prefixes are kept apart by the digest."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        self.folder = Path(options.folder)

    def prepare(
        self, request: EngineRequest, given: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        name = given.get("like")
        if name is None:
            return None, []
        names = sorted(path.stem for path in self.folder.glob("*.safetensors"))
        if name not in names:
            there = ", ".join(names) or "none"
            raise RequestError(f"there is no adapter {name!r}. There are: {there}.", "like")
        digest = hashlib.sha256((self.folder / f"{name}.safetensors").read_bytes()).hexdigest()
        return Raw(msgpack.encode((name, digest))), [CacheKey(0, 1, f"lora {digest}")]
