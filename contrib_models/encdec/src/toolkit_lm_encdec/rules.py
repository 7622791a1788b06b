"""What decoders begin with, where it is more than the decoder start token. Needs no torch."""

from __future__ import annotations

from toolkit_lm.renderer import EncoderDecoderRules


class T5GemmaRules(EncoderDecoderRules):
    """Each side states the length of its own sequences."""

    encoder_length_keys = ("encoder.max_position_embeddings",)


class MBartRules(EncoderDecoderRules):
    """The start token, and the language that the checkpoint forces, if any: mBART-50. Others begin with their language itself."""

    def default_decoder_prompt(self) -> list[int]:
        forced = self.generation.get("forced_bos_token_id")
        return [*super().default_decoder_prompt(), *([forced] if isinstance(forced, int) else [])]


class BartRules(MBartRules):
    """The start token, and that of a text's beginning, as in training. The checkpoint may force another one."""

    def default_decoder_prompt(self) -> list[int]:
        prompt, begin = super().default_decoder_prompt(), self.generation.get("bos_token_id")
        return [*prompt, begin] if len(prompt) == 1 and isinstance(begin, int) else prompt
