"""RequestHalf: the half of a part that runs at the front, and prepares the part's data of each
request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw, structs

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.requests import RequestOptions


class RequestHalf:
    """Front half of a part. There is one per front. Its module imports no torch. `prepare` may be
    called from several threads."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        """`config` is resolved. `options`: the plugin's own options, or None."""

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        """Called once for a request, before it is sent. `arguments`: arguments of the parameters
        that the plugin registers under the part's name; empty if the client gave none.

        Returns the request's data for the part, msgpack that becomes `request.inputs.parts[name]`
        (None: there is none). Also returns what keys and values of its tokens depend on because of
        it: `CacheKey(0, 1, x)` separates prefixes from the first token on. Raises ValueError for a
        request that cannot be served. A RequestError may name the parameter.
        """
        return None, []

    def keyword(self, name: str, value: Any) -> Mapping[str, str] | None:
        """Returns what a keyword of `LLM.generate`, `LLM.chat` or a request's options adds to the
        request's context, which `prepare` reads. None: the half has no such keyword. Raises
        RequestError."""
        return None


class RequestParts:
    """The front halves of plugins' parts."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        """Raises PluginError if a half cannot be made."""
        self._registry = plugins.parts
        self.by_name: dict[str, RequestHalf] = {
            entry.key: plugins.parts.make_half(
                entry.key, "request", config, options=plugins.options(entry.plugin)
            )
            for entry in plugins.parts.used("request", config)
        }

    def keyword(self, name: str, value: Any) -> Mapping[str, str] | None:
        """Returns the result of the first half that has the keyword; None: there is none."""
        found = (half.keyword(name, value) for half in self.by_name.values())
        return next((context for context in found if context is not None), None)

    def with_context(self, options: RequestOptions) -> RequestOptions:
        """Returns the options, with the keywords of the parts as `context`."""
        context: dict[str, str] = {}
        others = RequestOptions()
        for name, value in options.items():
            is_own = value is None or name in RequestOptions.__annotations__
            own = None if is_own else self.keyword(name, value)
            if own is None:
                others[name] = value  # type: ignore[literal-required]
            else:
                context |= own
        if context:
            others["context"] = {**others.get("context", {}), **context}
        return others

    def prepare(self, request: EngineRequest) -> None:
        """Adds the parts' data and cache keys to a request. Raises RequestError; if a half has
        failed, it names the plugin."""
        shares: dict[str, Raw] = {}
        for name, half in self.by_name.items():
            arguments = request.inputs.model_arguments.get(name, {})
            try:
                share, keys = half.prepare(request, arguments)
            except ValueError as error:
                param = getattr(error, "param", None) or next(iter(arguments), None)
                raise RequestError(str(error), param) from error
            except Exception as error:
                owner = self._registry.get(name).owner
                failure = owner.failure(error, f"prepare() of part {name!r}")
                raise RequestError(failure, next(iter(arguments), None)) from error
            request.cache_keys += keys
            if share is not None:
                shares[name] = share
        if shares:
            request.inputs = structs.replace(request.inputs, parts=shares)
