"""ModelConformance finds what is wrong with a model, and TransformersConformance compares with what it should."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import CheckpointWeights, RowParallelLinear
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import TransformersConformance
from toolkit_lm_devkit.model import Subject
from toolkit_lm_devkit.sharding import assert_shards

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


class Kit(TransformersConformance):
    """Llama, with a class of the test's choice."""

    tested = LlamaForCausalLM

    def make_hf_model(self, **variant):
        from transformers import LlamaConfig, LlamaForCausalLM as Reference

        return Reference(LlamaConfig(**SHAPE | variant))

    def model_class(self, subject):
        return self.tested


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return Subject(folder, Kit().make_checkpoint(folder))


def kit_of(cls):
    return type("KitOf", (Kit,), {"tested": cls})()


def test_other_logits_are_found(subject):
    """The reference is moved, which is as good as moving the model."""
    shifted = Subject(subject.folder, lambda token_ids: subject.reference(token_ids) + torch.linspace(0, 3e-4, 272))
    with pytest.raises(AssertionError, match="logits differ by"):
        Kit().check_parity(shifted, max_num_seqs=8)


def test_a_position_too_far_is_found(subject):
    """A reference that sees one token more at the front, as a model would that counts positions from 1."""
    late = Subject(subject.folder, lambda token_ids: subject.reference([0, *token_ids])[1:])
    with pytest.raises(AssertionError, match="logits differ by"):
        Kit().check_parity(late)


def test_a_positional_constructor_is_found(subject):
    class Positional(LlamaForCausalLM):
        def __init__(self, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    with pytest.raises(AssertionError, match=r"parameters \['vllm_config', 'prefix'\] must be keyword-only"):
        kit_of(Positional).test_constructor_takes_two_keywords(subject)


def test_lenient_loading_is_found(subject):
    class Lenient(LlamaForCausalLM):
        def load_weights(self, weights):
            return {name for name, _ in weights}

    kit = kit_of(Lenient)
    for test in (
        kit.test_missing_weights_are_refused_by_name,
        kit.test_unexpected_weights_are_refused_by_name,
        kit.test_misshaped_weights_are_refused_by_name,
    ):
        with pytest.raises(pytest.fail.Exception):
            test(subject)


def test_an_error_without_a_name_is_found(subject):
    class Vague(LlamaForCausalLM):
        def load_weights(self, weights):
            try:
                return super().load_weights(weights)
            except CheckpointError:
                raise CheckpointError("the weights do not fit") from None

    with pytest.raises(AssertionError, match="does not name it"):
        kit_of(Vague).test_missing_weights_are_refused_by_name(subject)


def test_wrong_shards_are_found(subject):
    kit = Kit()
    whole, first, second = (kit.make_model(subject, rank=rank, ranks=ranks) for rank, ranks in ((0, 1), (0, 2), (1, 2)))
    for model in (whole, first, second):
        model.load_weights(CheckpointWeights(subject.folder))
    assert_shards(whole, [first, second])
    with pytest.raises(AssertionError, match="no rank holds entries"):
        assert_shards(whole, [first, first])
    first.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1
    with pytest.raises(AssertionError, match=r"down_proj\.weight: rank 0 holds other values"):
        assert_shards(whole, [first, second])


def test_a_bias_that_each_rank_adds_is_found(tmp_path, monkeypatch):
    """The shards are right: only a forward pass over several ranks tells."""
    biased = Subject(tmp_path, Kit().make_checkpoint(tmp_path, attention_bias=True, num_hidden_layers=2))
    Kit().test_ranks_and_stages_compute_the_whole(biased, 2)

    def forward(layer, x, residual=None):
        out = layer.method.apply(x, layer.bias)
        total = tensor_parallel_group(layer.parallel).all_reduce(out) if layer.is_sharded else out
        return total if residual is None else total + residual

    monkeypatch.setattr(RowParallelLinear, "forward", forward)
    Kit().test_shards_make_up_the_whole(lambda variant: biased, "default", 2)
    with pytest.raises(AssertionError, match="in 2 stages, gives other logits than one alone"):
        Kit().test_ranks_and_stages_compute_the_whole(biased, 2)
