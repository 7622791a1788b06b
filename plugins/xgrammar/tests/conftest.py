"""An engine whose grammars xgrammar compiles."""

from __future__ import annotations

from functools import partial

import pytest
from toolkit_lm import LLM
from toolkit_lm_devkit import generate_structured


@pytest.fixture(scope="session")
def llm():
    with LLM(
        "tiny",
        dtype="float32",
        max_num_seqs=16,
        plugin_option=["structured_output.backend=xgrammar"],
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def generate(llm):
    return partial(generate_structured, llm)
