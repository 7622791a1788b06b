"""ComposedModel: an encoder of media and a language model, each with weights of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    Absent,
    HFConfig,
    IntermediateTensors,
    Model,
    is_first_stage,
    join,
    logits_of,
    make_part,
    see_encoder_tokens,
)
from toolkit_lm.parts import EncoderSequences, MediaPart
from torch import Tensor

_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
}
"""Architectures by `model_type`, if their names do not follow from it."""
_DECODER = re.compile(r"^(model\.language_model|language_model\.model)\.")
"""Prefixes of the language part's decoder in checkpoints: the first is used in memory by
transformers 5, the second in most files."""
_LANGUAGE = re.compile(r"^language_model\.")


def text_config(hf_config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language part, on top of `defaults`: configs leave out what is
    transformers' default."""
    own: dict[str, Any] = {**defaults, **HFConfig(hf_config).require("text_config", dict)}
    config = HFConfig(own)
    if not config.get("architectures", list):
        kind = config.require("model_type", str)
        named = "".join(part.capitalize() for part in kind.split("_")) + "ForCausalLM"
        own["architectures"] = [_ARCHITECTURES.get(kind, named)]
    return own


class ComposedModel(Model):
    """A media model: `encoder`, a Model that makes embeddings of media, and `language_model`, any
    registered decoder.

    The first pipeline rank has the encoder."""

    parts = {"media": MediaPart}
    encoder_class: ClassVar[type[Model]]
    """Class of the encoder. Its weight names are those of the checkpoint's `model`."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values of `text_config`."""
    language_name: ClassVar[str] = "language_model"
    """Name of the language part in checkpoints, a prefix of its own names; empty: no prefix."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.language_model = self.make_language_model(join(prefix, self.language_name))
        encodes = is_first_stage(vllm_config.parallel)
        self.encoder = (
            self.encoder_type()(vllm_config=vllm_config, prefix=prefix) if encodes else Absent()
        )
        see_encoder_tokens(self.encoder)

    def encoder_type(self) -> type[Model]:
        """Class of the encoder, where it depends on the checkpoint."""
        return self.encoder_class

    def make_language_model(self, prefix: str) -> Model:
        """The language part, whose name in checkpoints is `prefix`."""
        return make_part(self.vllm_config, self.text_config(), prefix)

    def text_config(self) -> dict[str, Any]:
        """The config.json of the language part."""
        return text_config(self.vllm_config.hf_config, self.defaults)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        part: Any = self.language_model
        embedded: Tensor = part.embed_input_ids(input_ids)
        return embedded

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        part: Any = self.encoder
        embeds: list[Tensor] = part.embeddings([item["pixel_values"] for item in items], sequences)
        return embeds

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        out: Tensor | IntermediateTensors = self.language_model(
            input_ids, positions, inputs_embeds=inputs_embeds, intermediate=intermediate
        )
        return out

    @logits_of("language_model")
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # Each part loads as it would alone, and takes what is its own.
        if iter(weights) is weights:
            weights = list(weights)
        parts = {"language_model": self.language_model, "encoder": self.encoder}
        return {
            f"{name}.{param}"
            for name, part in parts.items()
            if isinstance(part, Model)
            for param in part.load_weights(self._weights_of(name, weights))
        }

    def _weights_of(
        self, part: str, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        base = f"{getattr(self.language_model, 'decoder_name', 'model')}."
        for name, tensor in weights:
            renamed = _LANGUAGE.sub("", _DECODER.sub(base, name))
            is_language = renamed != name or name.startswith("lm_head.")
            if is_language == (part == "language_model"):
                yield renamed, tensor
