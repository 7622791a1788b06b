"""IA3 (Liu et al. 2022): requests may name adapters, folders of the option's that PEFT saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Raw, Struct, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import LogitsProcessorRegistry, PartRegistry, hookimpl
from toolkit_lm.processing import RequestHalf

WEIGHTS = "adapter_model.safetensors"


class Options(Struct, frozen=True):
    folder: str


class Ia3Params(ProcessorParams):
    ia3: Annotated[str | None, param("Name of the adapter.", max_length=64)] = None


def adapters(folder: str) -> list[str]:
    return sorted(path.parent.name for path in Path(folder).glob(f"*/{WEIGHTS}"))


class Ia3Requests(RequestHalf):
    """Cached prefixes are kept apart by the adapter's digest."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        self.digests = {
            name: hashlib.sha256((Path(options.folder) / name / WEIGHTS).read_bytes()).hexdigest()
            for name in adapters(options.folder)
        }

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        if (name := arguments.get("ia3")) is None:
            return None, []
        if name not in self.digests:
            raise RequestError(f"no adapter {name!r}. There are: {[*self.digests]}.", "ia3")
        return Raw(msgpack.encode(name)), [CacheKey(0, 1, f"ia3 {self.digests[name]}")]


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("ia3", None, params=Ia3Params)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add("ia3", request="toolkit_lm_ia3:Ia3Requests", worker="toolkit_lm_ia3.worker:Ia3Part")
