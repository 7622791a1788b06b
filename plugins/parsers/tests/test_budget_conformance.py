"""The kit for logits processors, for what ends reasoning."""

from __future__ import annotations

from toolkit_lm_devkit import LogitsProcessorConformance
from toolkit_lm_devkit.logits_processor import LetterRenderer
from toolkit_lm_parsers.marks import Marks
from toolkit_lm_parsers.params import ThinkingParams
from toolkit_lm_parsers.thinking_budget import ThinkingBudget


class ThinkingRenderer(LetterRenderer):
    chat_template_source = "</think>"

    def token_texts(self, token_ids):
        return [chr(token_id) for token_id in token_ids]


class TestThinkingBudget(LogitsProcessorConformance):
    processor = ThinkingBudget
    params = ThinkingParams
    cases = (
        {"thinking_token_budget": 0},
        {"thinking_token_budget": 0, "thinking_format": "seed_think"},
    )
    wrong = (
        {"thinking_token_budget": -2},
        {"thinking_token_budget": 1, "thinking_format": "hermes"},
        {"thinking_format": "x" * 100},
    )

    def arguments(self, given):
        arguments = self.params(**given).prepare(ThinkingRenderer())
        assert arguments is not None
        # The kit's prompts are random tokens: each of them has begun to reason.
        return {**arguments, "marks": list(Marks("", arguments["marks"][1]))}
