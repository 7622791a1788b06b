"""RequestHalf: the half of a part that runs at the front, and prepares the part's data of each
request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Raw, structs

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.requests import RequestOptions
from toolkit_lm.prompts import each_of


class RequestHalf:
    """Front half of a part. There is one per front. Its module imports no torch. `prepare` may be
    called from several threads."""

    keywords: ClassVar[Sequence[str]] = ()
    """Keywords of `LLM.generate`, `LLM.chat` and of a request's options that the half has."""
    plugins: Plugins
    """The loaded plugins. Set after the constructor."""

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
        request that cannot be served. A RequestError passes unchanged, and may name the parameter.
        """
        return None, []

    def keyword(self, name: str, value: Any) -> Mapping[str, str]:
        """Returns what one of `keywords` adds to a request's context, which `prepare` reads. Raises
        RequestError."""
        raise NotImplementedError


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
        for half in self.by_name.values():
            half.plugins = plugins
        self.prepares = any(
            type(half).prepare is not RequestHalf.prepare for half in self.by_name.values()
        )
        """Whether `prepare` has anything to do."""
        self.keywords = {name: half for half in self.by_name.values() for name in half.keywords}
        """The halves of keywords."""

    def contexts(
        self, keywords: Mapping[str, Any], count: int
    ) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Returns the context of each of `count` requests, from keywords of the parts, and the
        other keywords. A keyword's value may be a list, of one for each."""
        contexts: list[dict[str, str]] = [{} for _ in range(count)]
        others = {}
        for name, value in keywords.items():
            if name not in self.keywords:
                others[name] = value
                continue
            for context, item in zip(contexts, each_of(value, name, count), strict=True):
                context |= {} if item is None else self.keywords[name].keyword(name, item)
        return contexts, others

    def with_context(self, options: RequestOptions) -> RequestOptions:
        """Returns the options, with the keywords of the parts as `context`."""
        context: dict[str, str] = {}
        others = RequestOptions()
        for name, value in options.items():
            if name in self.keywords and value is not None:
                context |= self.keywords[name].keyword(name, value)
            else:
                others[name] = value  # type: ignore[literal-required]
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
            except RequestError as error:
                error.param = error.param or next(iter(arguments), None)
                raise
            except ValueError as error:
                raise RequestError(str(error), next(iter(arguments), None)) from error
            except Exception as error:
                owner = self._registry.get(name).owner
                failure = owner.failure(error, f"prepare() of part {name!r}")
                raise RequestError(failure, next(iter(arguments), None)) from error
            request.cache_keys += keys
            if share is not None:
                shares[name] = share
        if shares:
            request.inputs = structs.replace(request.inputs, parts=shares)
