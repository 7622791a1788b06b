"""Families with states or latent caches: compiled for any number of tokens, they give the tokens
that they give without a compiler."""

from __future__ import annotations

import deepseek_families
import hybrid_families
import pytest
import toolkit_lm_deepseek
import toolkit_lm_hybrid
import transformers
from compile_harness import answers
from toolkit_lm import SamplingParams
from toolkit_lm_devkit import make_checkpoint, randomize

PARAMS = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in (3, 1, 6)]
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9], [11, 12, 13, 14, 15])]


def made(architecture, variant):
    if architecture in toolkit_lm_hybrid.MODELS:
        return hybrid_families.make_model(
            architecture, hybrid_families.VARIANTS[architecture][variant]
        )
    make, variants = deepseek_families.FAMILIES[architecture]
    return make(**variants[variant])


def cases():
    """The first variant of each family, and the others by night."""
    for architecture in (*toolkit_lm_hybrid.MODELS, *toolkit_lm_deepseek.MODELS):
        variants = (
            hybrid_families.VARIANTS[architecture]
            if architecture in toolkit_lm_hybrid.MODELS
            else deepseek_families.FAMILIES[architecture][1]
        )
        for index, variant in enumerate(variants):
            yield pytest.param(architecture, variant, marks=pytest.mark.nightly if index else ())


@pytest.mark.parametrize(("architecture", "variant"), list(cases()))
def test_a_compiled_family_gives_its_tokens(tmp_path, monkeypatch, architecture, variant):
    if not hasattr(transformers, architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = made(architecture, variant)
    randomize(model)
    folder = make_checkpoint(tmp_path / "model", model)
    compiled, plain = (
        answers(folder, PROMPTS, PARAMS, level, renderer="tokens") for level in (1, 0)
    )
    assert compiled == plain
