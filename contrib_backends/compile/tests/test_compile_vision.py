"""Models that see: compiled for any number of tokens, with pictures among them and without, they
give the tokens that they give without a compiler."""

from __future__ import annotations

import pytest
import transformers
from compile_harness import answers
from given_renderer import Given
from qwen_harness import picture, prompt_of, random_qwen, rules_of
from tile_checkpoints import make_tiled_subject
from toolkit_lm import SamplingParams


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "glm4v"])
def test_a_compiled_family_gives_its_tokens(tmp_path, monkeypatch, family):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    theirs = random_qwen(family)
    theirs.save_pretrained(tmp_path / "model")
    made = prompt_of(rules_of(theirs), [11, 12], picture(4, 6), [13], picture(2, 2))
    prompts = [
        {"prompt_token_ids": [15, 16, 17]},
        {
            "prompt_token_ids": made.token_ids,
            "multi_modal_data": {"features": made.features},
        },
        {"prompt_token_ids": [9]},
    ]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    compiled, plain = (
        answers(tmp_path / "model", prompts, params, level, plugins=[Given()], renderer="given")
        for level in (1, 0)
    )
    assert compiled == plain


@pytest.mark.parametrize(
    "family", ["idefics3", pytest.param("mistral3", marks=pytest.mark.nightly)]
)
def test_a_compiled_family_reads_tiles(tmp_path, monkeypatch, family):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    subject = make_tiled_subject(tmp_path / "model", family)
    try:
        transformers.AutoImageProcessor.from_pretrained(str(subject.folder), backend="pil")
    except ImportError as error:  # old versions read pictures by torchvision alone
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    (image,) = subject.items(1)
    prompts = [
        {"prompt": f"what is {subject.mark}?", "multi_modal_data": {"image": [image]}},
        {"prompt": "nothing"},
    ]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    compiled, plain = (answers(subject.folder, prompts, params, level) for level in (1, 0))
    assert compiled == plain
