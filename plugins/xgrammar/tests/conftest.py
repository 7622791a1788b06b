"""An engine whose grammars xgrammar compiles."""

from __future__ import annotations

import pytest
from toolkit_lm import LLM, SamplingParams

OPTIONS = {"dtype": "float32", "max_num_seqs": 16, "plugin_option": ["structured_output.backend=xgrammar"]}


@pytest.fixture(scope="session")
def options():
    return OPTIONS


@pytest.fixture(scope="session")
def llm(options):
    with LLM("tiny", **options) as llm:
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
