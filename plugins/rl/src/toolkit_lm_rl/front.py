"""Front half: what a request finds while the engine sleeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from toolkit_lm.errors import RequestError
from toolkit_lm.messages import EngineRequest
from toolkit_lm.processing import Processor, RequestHalf

from toolkit_lm_rl.share import PART


class RlRequests(RequestHalf):
    """Refuses requests of an LLM that is paused: nobody could resume it while it waits."""


def refuse_requests(processor: Processor, refusal: str | None) -> None:
    """Refuses requests from now on, with these words. None: they are taken again."""
    half = processor.parts.by_name[PART]
    assert isinstance(half, RlRequests), f"the part {PART!r} is another plugin's"
    vars(half).pop("prepare", None)
    if refusal is not None:

        def prepare(request: EngineRequest, arguments: Mapping[str, Any]) -> NoReturn:
            raise RequestError(refusal)

        # Set where it is of use: a method of the class would cost each request something.
        vars(half)["prepare"] = prepare
        processor.parts.prepares = True
