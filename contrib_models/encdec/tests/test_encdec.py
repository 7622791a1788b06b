"""Every family gives what transformers gives, without an engine: sequences of several lengths,
begun in several steps."""

import pytest
import torch
from encdec_families import CASES, VARIANTS, make_checkpoint, our_class, reference_logits
from encdec_harness import Driver, load, random_sequences, steps


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function (architecture, variant) -> (folder, transformers model)."""
    made = {}

    def make(architecture, variant):
        if (architecture, variant) not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture, variant] = (
                folder,
                make_checkpoint(architecture, VARIANTS[architecture][variant], folder),
            )
        return made[architecture, variant]

    return make


def assert_same(sequences, theirs):
    for sequence in sequences:
        expected = reference_logits(theirs, sequence.encoder_ids, sequence.token_ids)
        assert expected.std() > 0.1
        torch.testing.assert_close(torch.cat(sequence.logits), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_logits(make, architecture, variant):
    folder, theirs = make(architecture, variant)
    sequences = random_sequences()
    Driver(load(our_class(architecture), folder)).run(*steps(sequences))
    assert_same(sequences, theirs)
