"""EncoderDecoderRules: what an encoder-decoder model makes of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.messages import EncoderInput
from toolkit_lm.prompts import parse_prompt
from toolkit_lm.renderer.contract import Renderer


class EncoderDecoderRules:
    """As most models have it. A model that differs is registered with a subclass: `models.add(..., encoder_decoder="module:Class")`.

    One instance serves all requests of an engine, from several threads. It needs no torch.
    """

    encoder_length_keys: ClassVar[tuple[str, ...]] = ("max_source_positions", "max_position_embeddings", "n_positions")
    """Keys of config.json: the first that is there states the longest encoder prompt. None there: as many tokens as max_model_len."""

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        """`config` is resolved."""
        self.config = config
        self.renderer = renderer
        assert config.checkpoint is not None
        stated = {key: value for key, value in config.checkpoint.generation_config.items() if value is not None}
        # As in transformers: with a file of their own, no tokens are forced that it does not name.
        other = {key: value for key, value in config.hf_config.items() if not (stated and key.startswith("forced_"))}
        self.generation: Mapping[str, Any] = {**other, **stated}
        """generation_config.json, and where it says nothing config.json."""

    @property
    def start_token_id(self) -> int:
        """The decoder start token, with which every decoder prompt begins. Raises CheckpointError where the checkpoint names none."""
        for key in ("decoder_start_token_id", "bos_token_id"):
            if (value := self.generation.get(key)) is not None:
                if type(value) is not int or not 0 <= value < (self.config.vocab_size or value + 1):
                    raise CheckpointError(f"{key} must be a token id of the model, not {value!r}.")
                return value
        raise CheckpointError("neither generation_config.json nor config.json names a decoder_start_token_id.")

    def encoder_input(self, prompt: Any, max_tokens: int | None) -> EncoderInput:
        """What the encoder reads of a prompt. `max_tokens`: it is to be cut, at its end; None: as it is. Raises RequestError."""
        parsed = parse_prompt(prompt)
        if max_tokens is None or "prompt_token_ids" in parsed:
            return EncoderInput.of_tokens(self.renderer.render_prompt(parsed).token_ids[:max_tokens])
        return EncoderInput.of_tokens(self.renderer.render_texts([parsed["prompt"]], max_tokens=max_tokens)[0].token_ids)

    def default_decoder_prompt(self) -> list[int]:
        """What the decoder begins with where nothing is given: the decoder start token, and what else the model always begins with."""
        return [self.start_token_id]

    def decoder_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Given token ids, with the decoder start token in front."""
        start = self.start_token_id
        return list(token_ids) if token_ids and token_ids[0] == start else [start, *token_ids]

    def forced_tokens(self, decoder_prompt: Sequence[int], max_output_tokens: int) -> dict[int, int]:
        """By place in the output, tokens that are drawn there whatever the logits are: as transformers forces BOS and EOS."""
        begin, end = (self.generation.get(key) for key in ("forced_bos_token_id", "forced_eos_token_id"))
        forced = {0: begin} if begin is not None and len(decoder_prompt) == 1 else {}
        if end is not None:
            forced[max_output_tokens - 1] = end[0] if isinstance(end, list) else end
        return forced

    def bad_words(self) -> list[list[int]]:
        """Sequences of tokens of which the last is not drawn after the others: those that the checkpoint names. Marian's is its padding."""
        ends = [[token] for token in self.renderer.eos_token_ids]
        return [word for word in self.generation.get("bad_words_ids") or [] if word not in ends]

    def logits_processors(self, decoder_prompt: Sequence[int], max_output_tokens: int) -> dict[str, dict[str, Any]]:
        """Arguments of registered logits processors, by name, that every request of the model has: forced tokens, say."""
        return {}
