"""An engine, and how its texts are asked for."""

from __future__ import annotations

from functools import partial

import pytest
from toolkit_lm import LLM
from toolkit_lm_devkit import generate_structured


@pytest.fixture(scope="session")
def llm():
    with LLM("tiny", dtype="float32", max_num_seqs=32) as llm:
        yield llm


@pytest.fixture(scope="session")
def generate(llm):
    return partial(generate_structured, llm)


@pytest.fixture(scope="session")
def ending(llm):
    """Logit bias that makes it likely that a document of random tokens ends."""
    ids = {
        token
        for text in ('"', "}", "]", '"}', "]}", " }")
        for token in llm.engine.renderer.render_prompt(text, add_special_tokens=False).token_ids
    }
    return dict.fromkeys([*ids, *llm.engine.renderer.eos_token_ids], 6.0)
