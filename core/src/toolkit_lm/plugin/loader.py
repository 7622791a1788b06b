"""The second phase of loading: imports the wanted plugins inside error boundaries, checks their
hooks, and collects their entries."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pluggy

from toolkit_lm.errors import PluginError, nearest
from toolkit_lm.plugin import hookspecs
from toolkit_lm.plugin.boundary import reason
from toolkit_lm.plugin.discovery import Candidate, check_api_version
from toolkit_lm.plugin.info import PluginInfo, PluginWarning
from toolkit_lm.plugin.markers import HOOK_PREFIX, PROJECT
from toolkit_lm.plugin.options import check_options_class
from toolkit_lm.plugin.registries import Registries, by_hook, copied

_SILENCE = 2.0
"""Seconds after which a running import is announced."""


@dataclass
class Loader:
    """Loads candidates into one pluggy manager, each inside its own error boundary."""

    manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(PROJECT))
    registries: Registries = field(default_factory=Registries)

    def load(self, candidates: list[Candidate]) -> None:
        """Loads all candidates that are not disabled. Each one's `info` then has the result."""
        self.manager.add_hookspecs(hookspecs)
        for step in (self._import, self._add_hookspecs, self._register, self._collect):
            for candidate in candidates:
                if candidate.info.status == "ok":
                    # A command's output may be read by a program.
                    with self._boundary(candidate), redirect_stdout(sys.stderr):
                        step(candidate)
        absent = [info.name for info in (c.info for c in candidates) if info.status != "ok"]
        hint = (
            f"Plugins that are not in use, and might add it: {', '.join(absent)}." if absent else ""
        )
        self.registries = copied(self.registries, None, hint)

    @contextmanager
    def _boundary(self, candidate: Candidate) -> Iterator[None]:
        info = candidate.info
        try:
            with info.boundary("loading", passes=()):
                yield
        except PluginError as error:
            if candidate.required:
                raise
            cause = error.__cause__
            assert cause is not None, "the boundary chains it"
            info.status = "broken"
            info.error = reason(cause)
            info.traceback = "".join(traceback.format_exception(cause))
            if candidate.plugin is not None and self.manager.is_registered(candidate.plugin):
                self.manager.unregister(candidate.plugin)
            warnings.warn(
                f"{str(error).rstrip('.')}. It is left out. `toolkit plugins show {info.name}` "
                "prints the traceback; "
                f"disable_plugins={[info.name]!r} silences this.",
                PluginWarning,
                stacklevel=5,
            )

    def _import(self, candidate: Candidate) -> None:
        info = candidate.info
        if candidate.refusal is not None:
            raise PluginError(candidate.refusal)
        if candidate.entry is not None:
            check_api_version(candidate)
            start = time.thread_time()
            # For another engine of this process there is nothing to wait for.
            imported = candidate.entry.module in sys.modules
            with nullcontext() if imported else _announced(info):
                module = importlib.import_module(candidate.entry.module)
            info.import_seconds = time.thread_time() - start
            info.file = module.__file__
            candidate.plugin = candidate.entry.load()
        if inspect.isclass(candidate.plugin):
            raise PluginError(
                f"{candidate.plugin.__name__} is a class: a plugin is a module or an instance"
            )
        check_options_class(getattr(candidate.plugin, "Options", None))

    def _add_hookspecs(self, candidate: Candidate) -> None:
        bring = getattr(candidate.plugin, "toolkit_register_hookspecs", None)
        if bring is None or not _is_marked(bring, "impl"):
            return
        brought = bring()
        for module in brought if isinstance(brought, list) else [brought]:
            for name in vars(module):
                if _is_marked(getattr(module, name), "spec"):
                    self._refuse_spec(name)
            self.manager.add_hookspecs(module)
            self.registries.brought |= {
                hook: kind() for hook, kind in getattr(module, "REGISTRIES", {}).items()
            }

    def _refuse_spec(self, name: str) -> None:
        if not name.startswith(HOOK_PREFIX):
            raise PluginError(f"hook {name!r} must have a name that starts with {HOOK_PREFIX!r}")
        if self._has_spec(name):
            raise PluginError(f"hook {name!r} has a specification already")

    def _register(self, candidate: Candidate) -> None:
        plugin = candidate.plugin
        info = candidate.info
        known = [name for name in vars(self.manager.hook) if self._has_spec(name)]
        for name in _hook_names(plugin):
            function = getattr(plugin, name)
            options = getattr(function, f"{PROJECT}_impl", None)
            if options is None:
                raise PluginError(
                    f"{name!r} is not marked with @hookimpl, so that it would never be called"
                )
            hook = options.get("specname") or name
            if hook not in known and options.get("optionalhook"):
                continue
            if hook not in known:
                raise PluginError(f"there is no hook {hook!r}. {nearest(hook, known)}")
            for refused in ("wrapper", "hookwrapper", "tryfirst", "trylast"):
                if options.get(refused):
                    raise PluginError(
                        f"{name!r} says {refused}=True: implementations are plain functions "
                        "here, called in load order"
                    )
            self._check_arguments(hook, function)
            info.hooks.append(hook)
        self.manager.register(plugin, name=info.name)

    def _check_arguments(self, hook: str, function: Callable[..., Any]) -> None:
        known = getattr(self.manager.hook, hook).spec.argnames
        for argument in inspect.signature(function).parameters.values():
            if argument.default is argument.empty and argument.name not in known:
                raise PluginError(
                    f"hook {hook!r} has no argument {argument.name!r}. "
                    f"{nearest(argument.name, known)}"
                )

    def _collect(self, candidate: Candidate) -> None:
        staged = copied(self.registries, candidate.info)
        for hook, registry in by_hook(staged).items():
            if hook not in candidate.info.hooks:
                continue
            (argument,) = getattr(self.manager.hook, hook).spec.argnames
            for call in implementations(self.manager, hook, candidate.info.name):
                call(**{argument: registry})
        self.registries = staged

    def _has_spec(self, hook: str) -> bool:
        caller = getattr(self.manager.hook, hook, None)
        return caller is not None and caller.has_spec()


def implementations(
    manager: pluggy.PluginManager, hook: str, plugin: str
) -> list[Callable[..., Any]]:
    """A plugin's implementations of a hook. They are called with keywords for all the hook's
    arguments."""
    found = [
        impl for impl in getattr(manager.hook, hook).get_hookimpls() if impl.plugin_name == plugin
    ]
    return [partial(_call, impl) for impl in found]


def _call(impl: pluggy.HookImpl, **arguments: Any) -> Any:
    return impl.function(**{name: arguments[name] for name in impl.argnames})


def _hook_names(plugin: object) -> list[str]:
    """Names in a plugin that are hooks, or look like hooks. Specifications that the plugin may hold
    are left out."""
    values = {name: getattr(plugin, name, None) for name in dir(plugin)}
    meant = [
        name
        for name, value in values.items()
        if name.startswith(HOOK_PREFIX) and callable(value) and not _is_marked(value, "spec")
    ]
    return [name for name, value in values.items() if name in meant or _is_marked(value, "impl")]


def _is_marked(function: object, kind: str) -> bool:
    return isinstance(getattr(function, f"{PROJECT}_{kind}", None), dict)


@contextmanager
def _announced(info: PluginInfo) -> Iterator[None]:
    """Context that announces the plugin being imported, if the import is slow or interrupted."""
    timer = threading.Timer(
        _SILENCE, print, [f"importing {info} ..."], {"file": sys.stderr, "flush": True}
    )
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted while importing {info}", file=sys.stderr)
        raise
    finally:
        timer.cancel()
