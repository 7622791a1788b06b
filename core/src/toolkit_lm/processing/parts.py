"""RequestHalf: the half of a part that prepares, at the front, a request's share of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw, structs

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.plugin import Plugins


class RequestHalf:
    """One per front. Its module imports no torch. `prepare` may be called from several threads."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        """`config` is resolved. `options`: the plugin's own, or None."""

    def prepare(
        self, request: EngineRequest, given: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        """Called once for a request, before it is sent. `given`: the arguments of the parameters
        that the plugin registers under the part's name; empty where the client gave none.

        Returns the request's share, msgpack that becomes `request.inputs.parts[name]` (None: it has
        none), and what keys and values of its tokens depend on because of it: `CacheKey(0, 1, x)`
        keeps prefixes apart from the first token on. Raises ValueError for a request that cannot be
        served; as RequestError it may name the parameter.
        """
        return None, []


class RequestParts:
    """The front halves of plugins' parts."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        """Raises PluginError where one cannot be made."""
        self._registry = plugins.parts
        self.by_name: dict[str, RequestHalf] = {
            entry.key: plugins.parts.make_half(
                entry.key, "request", config, options=plugins.options(entry.plugin)
            )
            for entry in plugins.parts.used("request", config)
        }

    def prepare(self, request: EngineRequest) -> None:
        """Gives a request its shares and cache keys. Raises RequestError; where a half has failed,
        it names the plugin."""
        shares: dict[str, Raw] = {}
        for name, half in self.by_name.items():
            given = request.inputs.model_arguments.get(name, {})
            try:
                share, keys = half.prepare(request, given)
            except ValueError as error:
                param = getattr(error, "param", None) or next(iter(given), None)
                raise RequestError(str(error), param) from error
            except Exception as error:
                owner = self._registry.get(name).owner
                what = owner.failure(error, f"prepare() of part {name!r}")
                raise RequestError(what, next(iter(given), None)) from error
            request.cache_keys += keys
            if share is not None:
                shares[name] = share
        if shares:
            request.inputs = structs.replace(request.inputs, parts=shares)
