"""The registry of logits processors, and of the sampling parameters that turn them on."""

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
    """A logits processor: its class, and the parameters with which requests turn it on."""

    params: type[ProcessorParams]
    for_model: bool = False
    """There is no processor: the parameters are for the model, and the target is their class."""
    priority: int = 0
    """Order among processors at the same place: the highest priority runs first."""


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
        """Registers a subclass of toolkit_lm.sampling.LogitsProcessor, and the parameters with
        which requests turn it on.

        `target` None: there is no processor. The RequestHalf of the part `name` gets the arguments;
        a StepPart finds them as `seq.inputs.model_arguments[name]`.

        Among processors at the same place, the highest `priority` runs first; equal priorities run
        in the order of registration. Raises PluginError if another parameter has the same name.
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
        """Cache key of the changes that arguments, by processor, make in the forward pass; None:
        they change nothing."""
        counted = {
            name: values
            for name, values in arguments.items()
            if self.get(name).params.changes_forward
        }
        if not counted:
            return None
        encoded = msgpack.encode(counted, order="deterministic")
        return f"arguments {hashlib.sha256(encoded).hexdigest()}"

    @property
    def params(self) -> dict[str, Option]:
        """The parameters of all logits processors, by name, without core's own."""
        return {
            name: o
            for entry in self.entries()
            for name, o in params_of(entry.params).items()
            if name not in SAMPLING_PARAMS
        }

    def parse(self, extra_args: Mapping[str, Any]) -> dict[str, ProcessorParams]:
        """Parses the parameters of each logits processor that has some in `extra_args`. Raises
        RequestError for one that is unknown or out of range."""
        by_processor: dict[str, dict[str, Any]] = {}
        for name, value in extra_args.items():
            entry = next(
                (entry for entry in self.entries() if name in entry.params.__struct_fields__), None
            )
            if entry is None:
                known = nearest(
                    name,
                    [
                        other_name
                        for other_name in (*SAMPLING_PARAMS, *self.params)
                        if other_name != name
                    ],
                    otherwise="",
                )
                where = " ".join(
                    part for part in (parameter_source(name), known, self.hint) if part
                )
                raise RequestError(f"unknown sampling parameter {name!r}. {where}".rstrip(), name)
            by_processor.setdefault(entry.key, {})[name] = value
        return {key: self.get(key).params(**values) for key, values in by_processor.items()}
