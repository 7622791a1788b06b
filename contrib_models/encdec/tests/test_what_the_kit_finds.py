"""Faults of an encoder-decoder model that the conformance kit finds. Moving the reference is as
good as moving the model."""

import pytest
import torch
from encdec_families import VARIANTS
from test_encdec_conformance import BART_LIKE, EncDecConformance
from toolkit_lm_devkit.model import Subject
from toolkit_lm_encdec.attention import CrossAttention
from toolkit_lm_encdec.rules import UsualRules

ARCHITECTURE = "BartForConditionalGeneration"


class Kit(EncDecConformance):
    architecture = ARCHITECTURE
    max_tokens = 4


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return Subject(
        folder, Kit().make_checkpoint(folder, **{**VARIANTS[ARCHITECTURE]["shared"], **BART_LIKE})
    )


def test_a_right_model_passes(subject):
    assert Kit().check(subject) == 0
    Kit().test_the_decoder_start_token_comes_first(subject)


@pytest.mark.parametrize(
    "moved",
    [
        lambda reference: lambda encoder, tokens: reference([*encoder, encoder[0]], tokens),
        lambda reference: lambda encoder, tokens: reference(encoder[::-1], tokens),
        lambda reference: lambda encoder, tokens: reference([5, 6], tokens),
        lambda reference: (
            lambda encoder, tokens: reference(encoder, tokens) + torch.linspace(0, 3e-4, 272)
        ),
    ],
    ids=["one token more", "turned round", "of another request", "other logits"],
)
def test_other_encoders_and_logits_are_found(subject, moved):
    with pytest.raises(AssertionError, match="logits differ by"):
        Kit().check(Subject(subject.folder, moved(subject.reference)))


def test_cross_attention_that_forgets_is_found(subject, monkeypatch):
    """It counts in the first step of a request alone."""
    forward = CrossAttention.forward

    def forgets(self, x, residual, states):
        return forward(self, x, residual, states) if states is not None else residual

    monkeypatch.setattr(CrossAttention, "forward", forgets)
    with pytest.raises(AssertionError, match="logits differ by"):
        Kit().check(subject)


def test_rules_that_leave_out_the_start_token_are_found(subject, monkeypatch):
    monkeypatch.setattr(UsualRules, "decoder_prompt", lambda self, token_ids: list(token_ids))
    with pytest.raises(AssertionError):
        Kit().test_the_decoder_start_token_comes_first(subject)


def test_shards_that_count_their_own_heads_are_found(subject, monkeypatch):
    forward = CrossAttention.forward

    def skewed(self, *given):
        out = forward(self, *given)
        return out + torch.linspace(0, 0.1, out.shape[-1]) * self.attn.params.num_heads

    monkeypatch.setattr(CrossAttention, "forward", skewed)
    with pytest.raises(AssertionError, match="other logits than one alone"):
        Kit().test_ranks_and_stages_compute_the_whole(subject, 2)
