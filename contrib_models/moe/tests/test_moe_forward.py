"""One forward pass without an engine gives the logits of transformers: in one rank, in two, as a
pipeline, and by the grouped product."""

import pytest
import torch
from moe_families import CASES, FAMILIES, WINDOW, make, reference_logits
from toolkit_lm_devkit import (
    Computed,
    assert_same_logits,
    load_checkpoint,
    logits_of,
    logits_of_ranks,
    randomize,
)
from toolkit_lm_moe.experts import RoutedExperts

INPUT_IDS = torch.arange(3, 3 + WINDOW + 20)
FIRST_CASES = [(family, next(iter(variants))) for family, (_, variants) in FAMILIES.items()]


def checkpoint(family, variant, folder):
    """The class of the family, and a transformers model that was saved to `folder`."""
    theirs = make(family, variant)
    randomize(theirs)
    theirs.save_pretrained(folder)
    return FAMILIES[family][0], theirs


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_are_those_of_transformers(family, variant, tmp_path):
    model_cls, theirs = checkpoint(family, variant, tmp_path)
    expected = reference_logits(theirs, INPUT_IDS)
    assert expected.std() > 0.1
    torch.testing.assert_close(
        logits_of([load_checkpoint(model_cls, tmp_path)], INPUT_IDS), expected, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(("family", "variant"), FIRST_CASES)
def test_pipeline_stages_chain_to_the_same_logits(family, variant, tmp_path):
    model_cls, theirs = checkpoint(family, variant, tmp_path)
    stages = [
        load_checkpoint(model_cls, tmp_path, rank=rank, pipeline_parallel_size=2) for rank in (0, 1)
    ]
    torch.testing.assert_close(
        logits_of(stages, INPUT_IDS), reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(("family", "variant"), FIRST_CASES)
def test_the_grouped_product_gives_the_same_logits(family, variant, tmp_path, monkeypatch):
    # On the CPU a model computes its experts one by one.
    class Stacked(RoutedExperts):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.stacked = self.stack()

    for module in ("routed", "gemma4"):
        monkeypatch.setattr(f"toolkit_lm_moe.{module}.RoutedExperts", Stacked)
    model_cls, theirs = checkpoint(family, variant, tmp_path)
    ours = load_checkpoint(model_cls, tmp_path)
    assert all(
        module.stacked is not None for module in ours.modules() if isinstance(module, RoutedExperts)
    )
    torch.testing.assert_close(
        logits_of([ours], INPUT_IDS), reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0
    )


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(tmp_path):
    for family, variant in FIRST_CASES:
        checkpoint(family, variant, tmp_path / family)
    work = [Computed(model_cls, tmp_path / family) for family, (model_cls, _) in FAMILIES.items()]
    for model, of_ranks in zip(work, logits_of_ranks(work, torch.arange(3, 40)), strict=True):
        expected = logits_of([load_checkpoint(*model)], torch.arange(3, 40))
        for ours in of_ranks:
            assert_same_logits(ours, expected)
