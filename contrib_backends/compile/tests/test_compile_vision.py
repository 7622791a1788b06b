"""Models that see: compiled for any number of tokens, with pictures among them and without, they
give the tokens that they give without a compiler."""

from __future__ import annotations

import pytest
import test_internvl as internvl
import transformers
import vision_harness
from compile_harness import answers
from given_renderer import Given
from qwen_harness import picture, prompt_of, random_qwen, rules_of
from test_anyres import make_anyres
from test_gemma4_vision import make_gemma4
from test_paligemma import make_pali
from tile_checkpoints import make_tiled_subject
from toolkit_lm import SamplingParams

TILED = ("idefics3", "mistral3")
SUBJECTS = {
    **{
        family: lambda folder, family=family: make_tiled_subject(folder, family) for family in TILED
    },
    "llava_next": lambda folder: make_anyres(folder, "next"),
    "llava_onevision": lambda folder: make_anyres(folder, "onevision"),
    "gemma4": lambda folder: make_gemma4(folder, "small"),
    "gemma4_moe": lambda folder: make_gemma4(folder, "large"),
    "paligemma": lambda folder: make_pali(folder, 62),
}
"""Families, and the checkpoint of each that is written into a folder."""
BY_NIGHT = ("mistral3", "llava_next", "gemma4_moe")
"""Families whose layers another of SUBJECTS has, too."""


def seen(folder, family):
    """A prompt with two pictures for a checkpoint that this writes into `folder`."""
    if family == "internvl":
        internvl.made("biases").save_pretrained(folder)
        _, rules = internvl.ours(folder)
        return internvl.given(
            vision_harness.prompt_of(rules, [11, 12], internvl.tiles(3), [13], internvl.tiles(1, 1))
        )
    theirs = random_qwen(family)
    theirs.save_pretrained(folder)
    made = prompt_of(rules_of(theirs), [11, 12], picture(4, 6), [13], picture(2, 2))
    return {
        "prompt_token_ids": made.token_ids,
        "multi_modal_data": {"features": made.features},
    }


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "glm4v", "internvl"])
def test_a_compiled_family_gives_its_tokens(tmp_path, monkeypatch, family):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = [
        {"prompt_token_ids": [15, 16, 17]},
        seen(tmp_path / "model", family),
        {"prompt_token_ids": [9]},
    ]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    compiled, plain = (
        answers(tmp_path / "model", prompts, params, level, plugins=[Given()], renderer="given")
        for level in (1, 0)
    )
    assert compiled == plain


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.nightly if family in BY_NIGHT else ())
        for family in SUBJECTS
    ],
)
def test_a_compiled_family_reads_pictures(tmp_path, monkeypatch, family):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    try:
        subject = SUBJECTS[family](folder)
        transformers.AutoImageProcessor.from_pretrained(str(folder), backend="pil")
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
