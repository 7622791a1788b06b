"""The kit fails what it should fail, and importing it is light."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from toolkit_lm_devkit import (
    all_pairs,
    assert_bf16_error,
    assert_same_logits,
    assert_same_tokens,
    randomize,
    write_checkpoint,
)
from toolkit_lm_devkit.checkpoints import write_tokenizer

LOGITS = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0005, 0.0]])


def test_importing_it_is_light():
    code = (
        "import sys, toolkit_lm_devkit.pytest_plugin; sys.exit(bool({'torch', 'numpy', "
        "'toolkit_lm.engine'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_unknown_name():
    import toolkit_lm_devkit

    with pytest.raises(AttributeError, match="toolkit_lm_devkit attribute assert_equal"):
        _ = toolkit_lm_devkit.assert_equal
    assert all(getattr(toolkit_lm_devkit, name) for name in toolkit_lm_devkit.__all__)


def test_same_logits():
    assert_same_logits(LOGITS, LOGITS + 9e-5)
    for other in (LOGITS + 2e-4, torch.full_like(LOGITS, torch.nan), LOGITS[:1]):
        with pytest.raises(AssertionError):
            assert_same_logits(other, LOGITS)


def test_same_tokens_may_differ_where_the_reference_is_not_sure():
    assert_same_tokens([1, 1], LOGITS)
    assert_same_tokens([1, 0], LOGITS)
    with pytest.raises(AssertionError, match=r"tokens at \[0\] are \[2\], not \[1\]"):
        assert_same_tokens([2, 1], LOGITS)


def test_bf16_error_is_relative_to_theirs():
    exact = [torch.zeros(4)]
    assert_bf16_error([torch.full((4,), 1.4)], [torch.ones(4)], exact)
    with pytest.raises(AssertionError):
        assert_bf16_error([torch.full((4,), 1.6)], [torch.ones(4)], exact)
    with pytest.raises(AssertionError):
        assert_bf16_error([torch.full((4,), torch.nan)], [torch.ones(4)], exact)


def test_all_pairs_covers_every_allowed_pair():
    factors = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3], "d": [True, False]}
    cases = all_pairs(factors, lambda case: case["a"] != case["b"])
    assert len(cases) < 20
    assert {(case["a"], case["b"]) for case in cases} == {
        (a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b
    }
    assert {(case["c"], case["d"]) for case in cases} == {
        (c, d) for c in (1, 2, 3) for d in (True, False)
    }


def test_the_tokenizer_is_what_transformers_reads(tmp_path):
    from transformers import AutoTokenizer

    write_checkpoint(
        tmp_path, {"vocab_size": 270, "model_type": "llama"}, {"weight": torch.zeros(2, 3).T}
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "a\u00e9 😀\n\x00"
    assert sorted(tokenizer.get_vocab().values()) == [0, 1, 2, *range(14, 270)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        == "[user]x"
    )
    with pytest.raises(ValueError, match="259 tokens at least"):
        write_tokenizer(tmp_path, 258)


def test_randomize_leaves_no_parameter_as_it_was():
    module = torch.nn.LayerNorm(8)
    randomize(module)
    assert not module.weight.eq(1).any()
    assert not module.bias.eq(0).any()
