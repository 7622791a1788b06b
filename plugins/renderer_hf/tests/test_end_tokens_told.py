"""Tokens that end a text: where the tokenizer names another one than the files do, both end it, and
that is told."""

import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm_renderer_hf.end_tokens import end_tokens as of_hf
from toolkit_lm_renderer_mistral.end_tokens import end_tokens as of_mistral


@pytest.mark.parametrize("end_tokens", [of_hf, of_mistral])
def test_an_end_of_the_tokenizer_beside_those_of_files_is_told(end_tokens, caplog):
    assert end_tokens(
        VllmConfig.default({"architectures": ["X"], "eos_token_id": [3, 4]}), 4, 10
    ) == [3, 4]
    assert end_tokens(VllmConfig.default({"architectures": ["X"]}), 4, 10) == [4]
    assert not caplog.messages
    assert end_tokens(VllmConfig.default({"architectures": ["X"], "eos_token_id": [3]}), 4, 10) == [
        3,
        4,
    ]
    assert caplog.messages == [
        "the tokenizer's eos_token 4 is none of eos_token_id [3]: all of them end a text."
    ]
