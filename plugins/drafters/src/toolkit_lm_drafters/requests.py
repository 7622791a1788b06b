"""A request's say on speculative decoding. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import CacheKey, DraftRequest, EngineRequest
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.processing import RequestHalf


class DraftParams(ProcessorParams):
    """Request parameters of speculative decoding. They change no token."""

    changes_forward = False
    speculative: Annotated[
        bool, param("Speculative decoding. False: no drafts for this request.", flag=False)
    ] = True
    max_draft_tokens: Annotated[
        int | None,
        param(
            "Speculative decoding: most drafts of a sequence in a step.",
            none="the drafter's own limit",
            ge=0,
            le=128,
            flag=False,
        ),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        most = self.max_draft_tokens if self.speculative else 0
        return None if most is None else {"max_draft_tokens": most}


class DraftRequests(RequestHalf):
    """Prepares a request's data for the drafters: its limit, and its scope."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        self._has_scopes = "suffix" in (config.scheduler.drafter or ())

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        """A scope is named by what separates cached prefixes from the first token on: the salt, and
        adapters."""
        data = DraftRequest(arguments.get("max_draft_tokens"), self._scope_of(request))
        return (None if data == DraftRequest() else Raw(msgpack.encode(data))), []

    def _scope_of(self, request: EngineRequest) -> str:
        if not self._has_scopes:
            return ""
        keys = [key for key in request.cache_keys if key.start == 0 and key.end <= 2]
        others = {
            name: value
            for name, value in request.inputs.model_arguments.items()
            if name != "drafter"
        }
        if not keys and not others:
            return ""
        return sha256(msgpack.encode((keys, others), order="sorted")).hexdigest()[:32]


def is_for(config: VllmConfig) -> bool:
    """Whether an engine drafts."""
    return bool(config.scheduler.drafter)
