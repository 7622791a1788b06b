"""Every family gives what transformers gives, without an engine: sequences of several lengths in
one flat batch."""

import pytest
import torch
from encoder_families import CASES, VARIANTS, load, make_checkpoint, our_class, random_sequences
from toolkit_lm_devkit import hidden_states

SEQUENCES = random_sequences()


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function (architecture, variant) -> (folder, transformers model)."""
    made = {}

    def make(architecture, family, variant):
        if (architecture, variant) not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture, variant] = (
                folder,
                make_checkpoint(architecture, VARIANTS[family][variant], folder),
            )
        return made[architecture, variant]

    return make


def assert_same(ours, theirs):
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_hidden_states(make, family, variant):
    folder, theirs = make(f"{family}Model", family, variant)
    states = hidden_states([load(our_class(f"{family}Model"), folder)], SEQUENCES)
    for sequence, state in zip(SEQUENCES, states, strict=True):
        with torch.inference_mode():
            assert_same(state, theirs(sequence[None]).last_hidden_state[0])


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_sequence_classification(make, family, variant):
    architecture = f"{family}ForSequenceClassification"
    folder, theirs = make(architecture, family, variant)
    model = load(our_class(architecture), folder)
    means = VARIANTS[family][variant].get("classifier_pooling") == "mean"
    pooled = torch.stack([s.mean(0) if means else s[0] for s in hidden_states([model], SEQUENCES)])
    with torch.inference_mode():
        assert_same(
            model.classifier(pooled),
            torch.cat([theirs(sequence[None]).logits for sequence in SEQUENCES]),
        )


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_token_classification(make, family, variant):
    architecture = f"{family}ForTokenClassification"
    folder, theirs = make(architecture, family, variant)
    model = load(our_class(architecture), folder)
    for sequence, state in zip(SEQUENCES, hidden_states([model], SEQUENCES), strict=True):
        with torch.inference_mode():
            assert_same(model.classifier(state), theirs(sequence[None]).logits[0])
