"""End of gpt-oss's reasoning, in its own tokens."""

from __future__ import annotations

from toolkit_lm_parsers.params import ThinkingParams


def test_reasoning_ends_with_special_tokens(renderer):
    arguments = ThinkingParams(thinking_token_budget=3).prepare(renderer)
    special = {
        text: token_id for token_id, text in arguments["texts"].items() if text.startswith("<|")
    }
    assert arguments["forced"][:2] == [special["<|end|>"], special["<|start|>"]]
    assert renderer.decode(arguments["forced"]) == "<|end|><|start|>assistant"
    assert [arguments["forced_again"][place] for place in (3, -1)] == [
        special["<|channel|>"],
        special["<|message|>"],
    ]
    assert (
        renderer.decode(arguments["forced_again"])
        == "<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    assert len(arguments["forced"]) == 3 and len(arguments["texts"]) < 2000
