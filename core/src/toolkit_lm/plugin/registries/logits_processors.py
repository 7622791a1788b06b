"""Logits processors, and the sampling parameters that turn them on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import msgpack

from toolkit_lm.config import Option
from toolkit_lm.errors import PluginError, RequestError, nearest
from toolkit_lm.param_spec import ProcessorParams, checks_of, params_of, spec_of
from toolkit_lm.params import SAMPLING_PARAMS
from toolkit_lm.plugin.registry import Entry, Registry
from toolkit_lm.plugin.shipped import parameter_source


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorEntry(Entry):
    """A logits processor: its class, and the parameters that requests turn it on with."""

    params: type[ProcessorParams]
    for_model: bool = False
    """There is no processor: the parameters are for the model, and the target is their class."""
    priority: int = 0
    """Of those that work at the same place, the one of the highest priority works first."""


class LogitsProcessorRegistry(Registry[LogitsProcessorEntry]):
    """Logits processors, by name."""

    noun = "logits processor"
    missing = RequestError
    base = "toolkit_lm.sampling:LogitsProcessor"

    def add(
        self,
        name: str,
        target: str | None,
        *,
        params: type[ProcessorParams],
        priority: int = 0,
        override: bool = False,
    ) -> None:
        """Registers a subclass of toolkit_lm.sampling.LogitsProcessor, and the parameters that
        requests turn it on with.

        `target` None: there is no processor. The RequestHalf of the part `name` is given the
        arguments; a StepPart finds them as `seq.inputs.model_arguments[name]`.

        Of those that work at the same place, the one of the highest `priority` works first; of
        equals, the first registered. Raises PluginError where a parameter has the name of another.
        """
        if not (isinstance(params, type) and issubclass(params, ProcessorParams)):
            raise PluginError(
                f"{self.owner}: params of {self.noun} {name!r} must be a "
                "toolkit_lm.param_spec.ProcessorParams."
            )
        for param, *_ in checks_of(params):
            owners = [
                str(entry.owner)
                for entry in self.entries()
                if entry.key != name and param in entry.params.__struct_fields__
            ]
            if (
                param in SAMPLING_PARAMS and not spec_of(SAMPLING_PARAMS[param]).by_processor
            ) or owners:
                raise PluginError(
                    f"{self.owner}: {self.noun} {name!r}: there is a parameter {param!r} of "
                    f"{[*owners, 'core'][0]} already."
                )
        self.add_entry(
            LogitsProcessorEntry,
            name,
            f"{params.__module__}:{params.__qualname__}" if target is None else target,
            "module:Class",
            params=params,
            priority=priority,
            override=override,
            for_model=target is None,
        )

    def load(self, key: str) -> Any:
        entry = self.get(key)
        return self.load_target(entry, entry.target, None if entry.for_model else self.base)

    def cache_key(self, arguments: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Names what arguments, by processor, can change in the forward pass; None: they change
        nothing."""
        counted = {
            name: given
            for name, given in arguments.items()
            if self.get(name).params.changes_forward
        }
        if not counted:
            return None
        encoded = msgpack.encode(counted, order="deterministic")
        return f"arguments {hashlib.sha256(encoded).hexdigest()}"

    @property
    def params(self) -> dict[str, Option]:
        """The parameters of all logits processors, by name; those that core states are left out."""
        return {
            name: o
            for entry in self.entries()
            for name, o in params_of(entry.params).items()
            if name not in SAMPLING_PARAMS
        }

    def parse(self, extra_args: Mapping[str, Any]) -> dict[str, ProcessorParams]:
        """The parameters of each logits processor of which any is given. Raises RequestError for
        one that is unknown or out of range."""
        given: dict[str, dict[str, Any]] = {}
        for name, value in extra_args.items():
            entry = next(
                (one for one in self.entries() if name in one.params.__struct_fields__), None
            )
            if entry is None:
                known = nearest(
                    name,
                    [one for one in (*SAMPLING_PARAMS, *self.params) if one != name],
                    otherwise="",
                )
                where = " ".join(
                    part for part in (parameter_source(name), known, self.hint) if part
                )
                raise RequestError(f"unknown sampling parameter {name!r}. {where}".rstrip(), name)
            given.setdefault(entry.key, {})[name] = value
        return {key: self.get(key).params(**values) for key, values in given.items()}
