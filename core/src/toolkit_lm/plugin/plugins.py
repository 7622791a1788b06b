"""Plugins: one loaded set of plugins. An engine owns one. Two sets in one process are
independent."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pluggy

from toolkit_lm._version import __version__
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, PluginError, nearest
from toolkit_lm.events import Event
from toolkit_lm.plugin import core
from toolkit_lm.plugin.boundary import Boundary, package_of, reason
from toolkit_lm.plugin.discovery import CORE_DISTRIBUTION, Candidate, discover, from_objects
from toolkit_lm.plugin.fingerprint import Fingerprint, fingerprint
from toolkit_lm.plugin.info import PluginInfo, PluginWarning
from toolkit_lm.plugin.listener import EventListener
from toolkit_lm.plugin.loader import Loader, implementations
from toolkit_lm.plugin.options import make_options
from toolkit_lm.plugin.registries import Registries
from toolkit_lm.plugin.registry import Registry

_EVENT_SECONDS = 0.005
"""Seconds that a plugin may take per event, on average. Outputs wait for it."""
_SLACK = 1.0
"""Total overrun of _EVENT_SECONDS, in seconds, before a plugin is warned about."""

RegistryT = TypeVar("RegistryT", bound=Registry[Any])


class Plugins(Registries):
    """A loaded set of plugins: their registries, and typed methods around their hooks.
    `Plugins.load(config)` makes one."""

    infos: list[PluginInfo]
    """Every installed plugin in load order, with the result of loading it."""
    boundary: Boundary
    """Error boundary for calls that may end in any plugin's code. The error names the plugin whose
    code raised it. Other errors pass."""

    def __init__(self, config: PluginsConfig, candidates: list[Candidate], loader: Loader) -> None:
        """Use `Plugins.load`."""
        self.config = config
        self.infos = [candidate.info for candidate in candidates]
        self._loaded = [(c.info, c.plugin) for c in candidates if c.info.status == "ok"]
        self._manager = loader.manager
        self.boundary = Boundary(self._failure)
        vars(self).update(vars(loader.registries))
        self._check_option_names()
        self._options = {
            name: self._make_options(name, values) for name, values in config.plugin_option.items()
        }
        self._listeners = tuple(self.implementations("toolkit_event"))
        self._patience: dict[str, float] = {}
        """Seconds that each plugin may still use for events, by plugin name."""
        self._watchers: list[tuple[PluginInfo, EventListener]] = []

    @classmethod
    def load(cls, config: PluginsConfig | None = None, extra: Sequence[object] = ()) -> Plugins:
        """Finds and loads the installed plugins that `config` wants, then the objects or modules in
        `extra`.

        Order: core, the distributions of this repository by name, other distributions by name,
        `extra`. A plugin that `config.plugins` names, or that is in `extra`, must work. For another
        plugin that fails there is a PluginWarning, and its info has the reason.

        Raises PluginError (a plugin is unknown, present twice, or requested and broken) and
        ConfigError (a plugin's options are wrong).
        """
        config = config or PluginsConfig()
        itself = Candidate(
            PluginInfo("core", CORE_DISTRIBUTION, __version__, core.__file__),
            plugin=core,
            required=True,
        )
        candidates = [itself, *discover(config), *from_objects(extra)]
        loader = Loader()
        loader.load(candidates)
        return cls(config, candidates, loader)

    @property
    def hook(self) -> pluggy.HookRelay:
        """pluggy's relay, for hooks that plugins bring:
        `plugins.hook.toolkit_...(argument=...)`."""
        return self._manager.hook

    def info(self, name: str) -> PluginInfo:
        """Returns the info of one plugin. Raises PluginError for an unknown name."""
        for info in self.infos:
            if info.name == name:
                return info
        raise PluginError(
            f"there is no plugin {name!r}. {nearest(name, [info.name for info in self.infos])}"
        )

    def implementations(self, hook: str) -> list[tuple[PluginInfo, Callable[..., Any]]]:
        """Each plugin's implementation of a hook, in load order. They are called with the hook's
        arguments as keywords."""
        return [
            (info, call)
            for info, _ in self._loaded
            for call in implementations(self._manager, hook, info.name)
        ]

    def brought_registry(self, kind: type[RegistryT]) -> RegistryT:
        """The registry of a class that a plugin brings together with its hook. Raises PluginError
        if no loaded plugin does."""
        for registry in self.brought.values():
            if isinstance(registry, kind):
                return registry
        raise PluginError(f"no loaded plugin brings a {kind.__name__}. {self.models.hint}".rstrip())

    def configure(self, config: VllmConfig) -> VllmConfig:
        """Returns `config` after every plugin's `toolkit_configure`. Raises PluginError if one
        raises or returns something else."""
        for info, call in self.implementations("toolkit_configure"):
            with info.boundary("toolkit_configure", passes=()):
                changed = call(config=config, options=self.options(info.name))
            if changed is None:
                continue
            if not isinstance(changed, VllmConfig):
                raise PluginError(
                    f"{info}: toolkit_configure must return a VllmConfig or None, not a "
                    f"{type(changed).__name__}."
                )
            if changed.plugins != config.plugins:
                raise PluginError(
                    f"{info}: toolkit_configure cannot change the options of plugins, which are "
                    "loaded already."
                )
            config = changed
        return config

    def watch(self, config: VllmConfig) -> None:
        """Calls every plugin's `toolkit_watch` for an engine of this config. The listeners stay
        until `close`.

        Raises PluginError if one raises.
        """
        try:
            for info, call in self.implementations("toolkit_watch"):
                with info.boundary("toolkit_watch", passes=()):
                    watcher: EventListener | None = call(
                        config=config, options=self.options(info.name)
                    )
                    if watcher is not None:
                        self._watchers.append((info, watcher))
                        self._listeners += ((info, watcher.on_event),)
        except PluginError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the listeners of `watch`. Never raises: a plugin that does is warned about. Safe
        to call twice."""
        watchers, self._watchers = self._watchers, []
        ended = [watcher.on_event for _, watcher in watchers]
        self._listeners = tuple(
            listener for listener in self._listeners if listener[1] not in ended
        )
        for info, watcher in watchers:
            try:
                watcher.close()
            except Exception as error:
                message = f"{info} failed to close its event listener: {reason(error)}"
                warnings.warn(message, PluginWarning, stacklevel=2)

    def add_listener(self, name: str, on_event: Callable[..., object]) -> None:
        """Adds a function of this process that receives every event, as the hook `toolkit_event`
        would. Warnings call it by `name`."""
        self._listeners += ((PluginInfo(name), on_event),)

    @property
    def has_event_listeners(self) -> bool:
        """Whether anything receives events. False: no event need be made."""
        return bool(self._listeners)

    def event(self, event: Event) -> None:
        """Passes an event to every plugin that listens. Never raises: a plugin that does is warned
        about, and dropped; a slow one is warned about once."""
        for listener in self._listeners:
            info, call = listener
            start = time.perf_counter()
            try:
                call(event=event)
            except Exception as error:
                self._listeners = tuple(other for other in self._listeners if other is not listener)
                message = f"{info} failed on an event, and gets no more events: {reason(error)}"
                warnings.warn(message, PluginWarning, stacklevel=2)
            seconds = time.perf_counter() - start
            left = self._patience.get(info.name, _SLACK) + _EVENT_SECONDS - seconds
            if left < 0:
                message = (
                    f"{info} is slow: outputs waited {seconds:.2f} s for what it does on the "
                    "last event, and for others before."
                )
                warnings.warn(message, PluginWarning, stacklevel=2)
                left = math.inf
            self._patience[info.name] = left

    def failure(self, error: BaseException) -> str:
        """Text of an exception, with the plugin whose code raised it, if any."""
        return self._failure(error) or reason(error)

    def boundary_of(self, owner: PluginInfo, target: type) -> Boundary:
        """Error boundary as `boundary`, for calls of a class of `owner`. The error names `owner`
        even if no plugin code was run, for instance for wrong arguments."""
        return Boundary(
            lambda error: self._failure(error) or owner.failure(error, target.__qualname__, target)
        )

    def _failure(self, error: BaseException) -> str | None:
        culprit = None
        called = ""
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            if culprit is None:
                culprit = next(
                    (info for info, _ in self._loaded if package_of(frame) in info.packages), None
                )
            elif package_of(frame) not in culprit.packages:
                break
            called = frame.f_code.co_qualname
        return None if culprit is None else culprit.failure(error, called)

    def options(self, name: str) -> Any:
        """A plugin's validated options: an instance of its `Options`, or None if it has none.

        Raises PluginError for an unknown plugin, and ConfigError if an option without a default is
        missing.
        """
        if name not in self._options:
            self._options[name] = self._make_options(name, {})
        return self._options[name]

    def fingerprint(self, *, installed: bool = False) -> Fingerprint:
        """Fingerprint of the plugins that other processes must have loaded too. `installed`:
        without plugins given from code."""
        return fingerprint(
            [
                (info, plugin)
                for info, plugin in self._loaded
                if not installed or info.distribution is not None
            ]
        )

    def options_class(self, name: str) -> type[Any] | None:
        """A plugin's `Options`; None if it has none, or is not loaded. Raises PluginError for an
        unknown plugin."""
        self.info(name)
        return next(
            (
                getattr(plugin, "Options", None)
                for info, plugin in self._loaded
                if info.name == name
            ),
            None,
        )

    def _make_options(self, name: str, values: dict[str, Any]) -> Any:
        kind = self.options_class(name)
        if kind is not None:
            return make_options(self.info(name), kind, values)
        if values:
            raise ConfigError(
                f"{self.info(name)} takes no options, but is given {', '.join(map(repr, values))}."
            )
        return None

    def _check_option_names(self) -> None:
        loaded = [info.name for info, _ in self._loaded]
        for name in self.config.plugin_option:
            if name not in loaded:
                status = next(
                    (f" (it is {info.status})" for info in self.infos if info.name == name), ""
                )
                raise ConfigError(
                    f"options are given for plugin {name!r}, which is not loaded{status}. "
                    f"{nearest(name, loaded)}"
                )
