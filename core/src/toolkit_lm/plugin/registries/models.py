"""Models, by the architectures that checkpoints name; and what drafts tokens for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry

LENGTH_KEYS = ("max_position_embeddings", "n_positions")
"""Keys of config.json that most models state their longest sequence under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Entry):
    """A model class."""

    runner: str = "generate"
    """The kind of runner that drives it."""
    model_type: str | None = None
    """The `model_type` of its checkpoints; None: of many, or of those that another class runs as
    well."""
    renderer: str | None = None
    """Name of the renderer that it needs; None: any that can read the checkpoint."""
    reserved_positions: int = 0
    """Of the positions that the checkpoint states, how many no token ever has (RoBERTa: those up to
    padding's)."""
    length_keys: tuple[str, ...] = LENGTH_KEYS
    """Keys of config.json: the first that is there states the longest sequence. "decoder.x" is x of
    its object `decoder`. Empty: there is none, as with ALiBi.
    """
    caches_prefixes: bool = True
    """What it keeps of a prompt can serve other requests that begin alike. False: prefix caching is
    off for it."""
    bounded: bool = True
    """No sequence can be longer than stated. False: it is what is taken where no other length is
    asked for."""
    encoder_decoder: str | None = None
    """Of an encoder-decoder model: "module:Class", the EncoderDecoderRules of its prompts."""
    multimodal: str | None = None
    """Of a multimodal model: "module:Class", the MultiModalRules of its images and other media."""
    is_fallback: bool = False
    """True: the key names no architecture; the class runs those that have no class of their own,
    and says which it refuses."""


class ModelRegistry(Registry[ModelEntry]):
    """Model classes, by the architecture that a checkpoint's config.json names; and fallbacks, by
    their own names."""

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
        caches_prefixes: bool = True,
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
            caches_prefixes=caches_prefixes,
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
        override: bool = False,
    ) -> None:
        """Registers a `FallbackModel`: of those that do not refuse a checkpoint without a class of
        its own, the first runs it.

        `name` is what the option `model_impl` calls it. Raises PluginError, as `add` does.
        """
        self.add_entry(
            ModelEntry,
            name,
            target,
            "module:Class",
            runner=runner,
            renderer=renderer,
            override=override,
            is_fallback=True,
        )

    def architectures_of(self, model_type: str) -> list[str]:
        """Those that are registered for a `model_type`; where there are none, what the first
        fallback says that knows one."""
        found = [entry.key for entry in self.entries() if entry.model_type == model_type]
        for name in () if found else self.fallbacks():
            with self.get(name).owner.boundary(f"architecture_of() of {self.noun} {name!r}"):
                architecture = self.load(name).architecture_of(model_type)
            if architecture is not None:
                return [architecture]
        return found

    def reserved_positions(self, key: str, config: Any) -> int:
        """Of the positions that a checkpoint states, how many no token ever has. Of a fallback its
        class says so of the checkpoint."""
        entry = self.get(key)
        if not entry.is_fallback:
            return entry.reserved_positions
        with entry.owner.boundary(f"reserved_positions() of {self.noun} {key!r}"):
            return int(self.load(key).reserved_positions(config))

    def load_rules(self, architecture: str) -> Any:
        """The class of an encoder-decoder model's rules for prompts; None of another model. Raises
        PluginError, as `load` does."""
        entry = self.get(architecture)
        if entry.encoder_decoder is None:
            return None
        return self.load_target(
            entry, entry.encoder_decoder, "toolkit_lm.renderer:EncoderDecoderRules"
        )

    def load_multimodal(self, architecture: str) -> Any:
        """As `load_rules`: the class of a multimodal model's rules for media."""
        entry = self.get(architecture)
        return (
            None
            if entry.multimodal is None
            else self.load_target(entry, entry.multimodal, "toolkit_lm.renderer:MultiModalRules")
        )

    def computes_items_whole(self, architecture: str) -> bool:
        """No chunk of a prompt ends inside an item of media. Raises PluginError, as `load` does."""
        rules = self.load_multimodal(architecture) if architecture in self else None
        return rules is not None and rules.bidirectional

    def architectures(self) -> list[str]:
        """The architectures that have a class of their own."""
        return [entry.key for entry in self.entries() if not entry.is_fallback]

    def fallbacks(self) -> list[str]:
        """The names of the fallbacks, in the order in which they are asked."""
        return [entry.key for entry in self.entries() if entry.is_fallback]


class DrafterRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.step.Drafter, by the name that the option drafter gives."""

    noun = "drafter"
    base = "toolkit_lm.step:Drafter"
