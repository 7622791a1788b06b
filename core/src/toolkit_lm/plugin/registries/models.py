"""Registries of models, by the architectures that checkpoints name, and of drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry

LENGTH_KEYS = ("max_position_embeddings", "n_positions")
"""Keys of config.json under which most models state their longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Entry):
    """A model class."""

    runner: str = "generate"
    """The kind of runner that drives the model."""
    model_type: str | None = None
    """The `model_type` of the model's checkpoints. None: there are several, or another class runs
    such checkpoints too."""
    renderer: str | None = None
    """Name of the renderer that the model needs; None: any that can read the checkpoint."""
    reserved_positions: int = 0
    """Number of the checkpoint's positions that no token ever has (RoBERTa: those up to
    padding's)."""
    length_keys: tuple[str, ...] = LENGTH_KEYS
    """Keys of config.json: the first present one states the longest sequence. "decoder.x" is x of
    the object `decoder`. Empty: the model has no limit, as with ALiBi."""
    bounded: bool = True
    """No sequence can be longer than stated. False: the stated length is only the default."""
    encoder_decoder: str | None = None
    """"module:Class" of an encoder-decoder model's EncoderDecoderRules; None: another kind of
    model."""
    multimodal: str | None = None
    """"module:Class" of a multimodal model's MultiModalRules for images and other media; None:
    another kind of model."""
    is_fallback: bool = False
    """True: the class is a fallback, and the key is not an architecture. It runs architectures
    without a class of their own, and states which it refuses."""


class ModelRegistry(Registry[ModelEntry]):
    """Model classes by the architecture in a checkpoint's config.json, and fallbacks by their own
    names."""

    noun = "model architecture"
    missing = UnsupportedError
    base = "toolkit_lm.model:Model"

    def add(
        self,
        architecture: str,
        target: str,
        *,
        runner: str = "generate",
        model_type: str | None = None,
        renderer: str | None = None,
        reserved_positions: int = 0,
        length_keys: tuple[str, ...] = LENGTH_KEYS,
        bounded: bool = True,
        encoder_decoder: str | None = None,
        multimodal: str | None = None,
        override: bool = False,
    ) -> None:
        """Registers a model class. Raises PluginError for a malformed target or a key that another
        plugin has."""
        self.add_entry(
            ModelEntry,
            architecture,
            target,
            "module:Class",
            runner=runner,
            model_type=model_type,
            renderer=renderer,
            reserved_positions=reserved_positions,
            length_keys=length_keys,
            bounded=bounded,
            encoder_decoder=encoder_decoder,
            multimodal=multimodal,
            override=override,
        )

    def add_fallback(
        self,
        name: str,
        target: str,
        *,
        runner: str = "generate",
        renderer: str | None = None,
        length_keys: tuple[str, ...] = LENGTH_KEYS,
        encoder_decoder: str | None = None,
        multimodal: str | None = None,
        override: bool = False,
    ) -> None:
        """Registers a `FallbackModel`. The first fallback that does not refuse a checkpoint without
        a class of its own runs it.

        `name` is the fallback's name in the option `model_impl`. Raises PluginError, as `add` does.
        """
        self.add_entry(
            ModelEntry,
            name,
            target,
            "module:Class",
            runner=runner,
            renderer=renderer,
            length_keys=length_keys,
            encoder_decoder=encoder_decoder,
            multimodal=multimodal,
            override=override,
            is_fallback=True,
        )

    def architectures_of(self, model_type: str) -> list[str]:
        """Architectures registered for a `model_type`. If there are none: those of the first
        fallback that knows the type."""
        found = [entry.key for entry in self.entries() if entry.model_type == model_type]
        for name in () if found else self.fallbacks():
            with self.get(name).owner.boundary(f"architecture_of() of {self.noun} {name!r}"):
                architecture = self.load(name).architecture_of(model_type)
            if architecture is not None:
                return [architecture]
        return found

    def reserved_positions(self, key: str, config: Any) -> int:
        """Number of a checkpoint's positions that no token ever has. A fallback's class computes it
        from the checkpoint."""
        entry = self.get(key)
        if not entry.is_fallback:
            return entry.reserved_positions
        with entry.owner.boundary(f"reserved_positions() of {self.noun} {key!r}"):
            return int(self.load(key).reserved_positions(config))

    def load_rules(self, architecture: str) -> Any:
        """The class of an encoder-decoder model's rules for prompts; None for other models. Raises
        PluginError, as `load` does."""
        entry = self.get(architecture)
        if entry.encoder_decoder is None:
            return None
        return self.load_target(
            entry, entry.encoder_decoder, "toolkit_lm.renderer:EncoderDecoderRules"
        )

    def load_multimodal(self, architecture: str) -> Any:
        """The class of a multimodal model's rules for media; None for other models. Raises
        PluginError, as `load` does."""
        entry = self.get(architecture)
        return (
            None
            if entry.multimodal is None
            else self.load_target(entry, entry.multimodal, "toolkit_lm.renderer:MultiModalRules")
        )

    def computes_items_whole(self, architecture: str) -> bool:
        """Whether chunks of a prompt never end inside a multimodal item. Raises PluginError, as
        `load` does."""
        rules = self.load_multimodal(architecture) if architecture in self else None
        return rules is not None and rules.bidirectional

    def architectures(self) -> list[str]:
        """Architectures that have a class of their own."""
        return [entry.key for entry in self.entries() if not entry.is_fallback]

    def fallbacks(self) -> list[str]:
        """Names of the fallbacks, in the order in which they are asked."""
        return [entry.key for entry in self.entries() if entry.is_fallback]


class DrafterRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.step.Drafter, by the name that the option drafter gives."""

    noun = "drafter"
    base = "toolkit_lm.step:Drafter"
