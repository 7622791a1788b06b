"""An engine, and how its texts are asked for."""

from __future__ import annotations

import pytest
from toolkit_lm import LLM, SamplingParams


@pytest.fixture(scope="session")
def llm():
    with LLM("tiny", dtype="float32", max_num_seqs=32) as llm:
        yield llm


@pytest.fixture(scope="session")
def generate(llm):
    """generate(structured_outputs, **params) -> the outputs of one request, none of them failed."""

    def generate(asked, prompt="Once upon a time", **params):
        given = {"max_tokens": 120, "seed": 1, "temperature": 1.5, **params}
        output = llm.generate(prompt, SamplingParams(structured_outputs=asked, **given), use_tqdm=False)[0]
        assert output.error is None
        return output.outputs

    return generate


@pytest.fixture(scope="session")
def ending(llm):
    """What makes it likely that a document of random tokens comes to its end."""
    ids = {
        token
        for text in ('"', "}", "]", '"}', "]}", " }")
        for token in llm.engine.renderer.render_prompt(text, add_special_tokens=False).token_ids
    }
    return dict.fromkeys([*ids, *llm.engine.renderer.eos_token_ids], 6.0)
