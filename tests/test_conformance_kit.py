"""Faults that the conformance classes of models, KV kinds and drafters find, and that
TransformersConformance compares with the right reference."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from toolkit_lm.attention import Attention, CacheBackend, current
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.kv import FullSpec, PageTensor, WindowSpec
from toolkit_lm.model import RowParallelLinear
from toolkit_lm.plugin import hookimpl
from toolkit_lm.step import Drafter
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import DrafterConformance, KVKindConformance, TransformersConformance
from toolkit_lm_devkit.executor import write_llama
from toolkit_lm_devkit.model import Subject
from toolkit_lm_devkit.sharding import assert_shards
from toolkit_lm_poolers.methods import Cls, Last
from toolkit_lm_weights.safetensors import CheckpointWeights

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
    shifted = Subject(
        subject.folder,
        lambda token_ids: subject.reference(token_ids) + torch.linspace(0, 3e-4, 272),
    )
    with pytest.raises(AssertionError, match="logits differ by"):
        Kit().check_parity(shifted, max_num_seqs=8)


def test_a_position_too_far_is_found(subject):
    """A reference that sees one token more at the front, as a model would that counts positions
    from 1."""
    late = Subject(subject.folder, lambda token_ids: subject.reference([0, *token_ids])[1:])
    with pytest.raises(AssertionError, match="logits differ by"):
        Kit().check_parity(late)


def test_a_model_that_needs_its_cache_is_found(subject, monkeypatch):
    """It computes what it should as long as there is a KV cache."""
    forward = Attention.forward

    def halved(layer, q, k=None, v=None):
        out = forward(layer, q, k, v)
        return out / 2 if current(layer.prefix)[0].kv_cache is None else out

    Kit().check_pooling(subject)
    monkeypatch.setattr(Attention, "forward", halved)
    Kit().check_parity(subject)
    with pytest.raises(AssertionError, match="logits differ by"):
        Kit().check_pooling(subject)


def test_a_pooled_token_that_is_not_the_last_is_found(subject, monkeypatch):
    monkeypatch.setattr(Last, "pool", Cls.pool)
    with pytest.raises(AssertionError, match="an embedding is off by"):
        Kit().check_pooling(subject)


def test_a_model_that_cannot_be_pooled_must_be_refused(subject):
    kit = type("Unpoolable", (Kit,), {"poolable": False})()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        kit.test_pooling_without_a_cache(lambda variant: subject, "default")


def test_a_positional_constructor_is_found(subject):
    class Positional(LlamaForCausalLM):
        def __init__(self, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    with pytest.raises(
        AssertionError, match=r"parameters \['vllm_config', 'prefix'\] must be keyword-only"
    ):
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
    whole, first, second = (
        kit.make_model(subject, rank=rank, ranks=ranks) for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
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
    biased = Subject(
        tmp_path, Kit().make_checkpoint(tmp_path, attention_bias=True, num_hidden_layers=2)
    )
    Kit().test_ranks_and_stages_compute_the_whole(biased, 2)

    def forward(layer, x, residual=None):
        out = layer.method.apply(x, layer.bias)
        total = tensor_parallel_group(layer.parallel).all_reduce(out) if layer.is_sharded else out
        return total if residual is None else total + residual

    monkeypatch.setattr(RowParallelLinear, "forward", forward)
    Kit().test_shards_make_up_the_whole(lambda variant: biased, "default", 2)
    with pytest.raises(AssertionError, match="in 2 stages, gives other logits than one alone"):
        Kit().test_ranks_and_stages_compute_the_whole(biased, 2)


# KV kinds


def kind_of(cls=WindowSpec, *, variants=(), backend=None, **fields):
    """The kit's class for a spec, and the spec."""
    shape = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    spec = cls(**shape | ({"window": 10} if issubclass(cls, WindowSpec) else {}) | fields)
    return type(
        "KitOf", (KVKindConformance,), {"spec": spec, "variants": variants, "backend": backend}
    )(), spec


def test_a_spec_that_is_no_value_is_found():
    class Mutable(FullSpec, frozen=False, kw_only=True, tag="mutable"):
        pass

    class Unequal(FullSpec, frozen=True, eq=False, kw_only=True, tag="unequal"):
        pass

    class Unhashable(FullSpec, frozen=True, kw_only=True, tag="unhashable"):
        sizes: list[int]

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        kit, spec = kind_of(Mutable)
        kit.test_a_spec_is_a_value(spec)
    with pytest.raises(AssertionError, match="is not equal"):
        kit, spec = kind_of(Unequal)
        kit.test_a_spec_is_a_value(spec)
    with pytest.raises(TypeError, match="unhashable"):
        kit, spec = kind_of(Unhashable, sizes=[1])
        kit.test_a_spec_is_a_value(spec)


def test_specs_that_ignore_a_field_are_found():
    class Blind(FullSpec, frozen=True, kw_only=True, tag="blind"):
        groups: int

        def __eq__(self, other):
            return self.block_size == other.block_size

        def __hash__(self):
            return self.block_size

    kit, _ = kind_of(Blind, groups=2, variants=[kind_of(Blind, groups=3)[1]])
    with pytest.raises(AssertionError, match="some are equal"):
        kit.test_specs_of_other_values_differ()


def test_a_tag_that_is_anothers_is_found():
    class Untagged(WindowSpec, frozen=True, kw_only=True):
        pass

    kit, spec = kind_of(Untagged)
    with pytest.raises(
        AssertionError, match="what is registered as 'window' is WindowSpec, not Untagged"
    ):
        kit.test_it_crosses_processes(spec)


def test_a_tag_that_nobody_registers_is_found():
    class Unregistered(WindowSpec, frozen=True, kw_only=True, tag="unregistered"):
        pass

    kit, spec = kind_of(Unregistered)
    with pytest.raises(ConfigError, match="no KV kind 'unregistered' is registered"):
        kit.test_it_crosses_processes(spec)


def test_a_spec_that_imports_torch_is_found():
    class Heavy(FullSpec, frozen=True, kw_only=True, tag="heavy"):
        pass

    Heavy.__module__ = "toolkit_lm.attention.layer"
    with pytest.raises(AssertionError, match=r"toolkit_lm\.attention\.layer imports torch"):
        kind_of(Heavy)[0].test_its_module_needs_no_torch()


@pytest.mark.parametrize(
    "trait", ["caches_prefixes", "forks_anywhere", "shared_within_step", "grows"]
)
def test_a_trait_that_is_no_boolean_is_found(trait):
    vague = type("Vague", (FullSpec,), {trait: None}, frozen=True, kw_only=True, tag="vague")
    kit, spec = kind_of(vague)
    with pytest.raises(AssertionError, match=f"{trait} is None"):
        kit.test_its_traits_are_booleans(spec)


class Unsure(FullSpec, frozen=True, kw_only=True, tag="unsure"):
    """It keeps snapshots of what needs none."""


class Beyond(Unsure, frozen=True, kw_only=True, tag="beyond"):
    caches_prefixes: ClassVar[bool] = False

    def stops_at(self, start, num_prompt_tokens, border):
        return start + border


class Between(Beyond, frozen=True, kw_only=True, tag="between"):
    def stops_at(self, start, num_prompt_tokens, border):
        return start + 1 if start < num_prompt_tokens else 0


class Never(Beyond, frozen=True, kw_only=True, tag="never"):
    def stops_at(self, start, num_prompt_tokens, border):
        return 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unsure, "caches_prefixes is True"),
        (Beyond, "which the step does not reach"),
        (Between, "is 1, which is no border"),
        (Never, "no snapshot is ever kept"),
    ],
)
def test_snapshots_that_nobody_can_use_are_found(kind, message):
    kit, spec = kind_of(kind, snapshots=4)
    with pytest.raises(AssertionError, match=message):
        kit.test_snapshots_are_kept_at_borders(spec)


@pytest.mark.parametrize("size", [0, 64.0, -4, None])
def test_a_page_without_bytes_is_found(size):
    class Empty(FullSpec, frozen=True, kw_only=True, tag="empty"):
        page_bytes = size

    kit, spec = kind_of(Empty)
    with pytest.raises(AssertionError, match=r"no number of bytes|a page has no bytes"):
        kit.test_a_page_has_bytes(spec)


def test_a_page_that_is_not_filled_is_found():
    class Keys(CacheBackend):
        @classmethod
        def page_layout(cls, spec):
            return [PageTensor((spec.block_size, spec.num_kv_heads, spec.head_size), spec.dtype)]

    kit, spec = kind_of(backend=Keys)
    with pytest.raises(
        AssertionError, match="the tensors of a page have 256 bytes, and the page 512"
    ):
        kit.test_page_layout_fills_the_page(spec)
    assert list(kit.parameters()["laid_out"].values()) == [spec]


class Short(WindowSpec, frozen=True, kw_only=True, tag="short"):
    """Its table ends too soon."""

    def num_blocks(self, num_tokens):
        return num_tokens // self.block_size


class Eager(WindowSpec, frozen=True, kw_only=True, tag="eager"):
    """It gives back the block of the next token."""

    def first_needed(self, num_tokens):
        return num_tokens // self.block_size + 1


class Regretful(WindowSpec, frozen=True, kw_only=True, tag="regretful"):
    """It wants blocks again that it has given back."""

    def first_needed(self, num_tokens):
        return 0 if num_tokens % 32 == 0 else super().first_needed(num_tokens)


class Narrow(WindowSpec, frozen=True, kw_only=True, tag="narrow"):
    """It forgets that neither the window nor the chunk begins at a block's edge."""

    def max_blocks(self, num_tokens, chunk):
        return min(self.num_blocks(num_tokens), -(-(self.window - 1 + chunk) // self.block_size))


class Shrinking(WindowSpec, frozen=True, kw_only=True, tag="shrinking"):
    """It counts as if long sequences needed less."""

    def max_blocks(self, num_tokens, chunk):
        return super().max_blocks(num_tokens, chunk) - (num_tokens > 100)


class Greedy(WindowSpec, frozen=True, kw_only=True, tag="greedy"):
    """It counts blocks that no table has."""

    def max_blocks(self, num_tokens, chunk):
        return self.num_blocks(num_tokens) + 1


class Chunkless(WindowSpec, frozen=True, kw_only=True, tag="chunkless"):
    """It counts less for larger chunks."""

    def max_blocks(self, num_tokens, chunk):
        return max(0, self.num_blocks(num_tokens) - chunk)


@pytest.mark.parametrize(
    ("cls", "test", "message"),
    [
        (
            Short,
            "test_a_table_covers_all_tokens",
            r"num_blocks\(1\) is 0, but the table has 1 entries",
        ),
        (
            Eager,
            "test_what_is_given_back_is_not_needed_again",
            r"first_needed\(0\) is 1, but the next token is in block 0",
        ),
        (
            Regretful,
            "test_what_is_given_back_is_not_needed_again",
            r"first_needed\(32\) is 0, but 5 for fewer tokens",
        ),
        (
            Narrow,
            "test_max_blocks_are_enough",
            r", 1\) is 3, but a sequence in such steps holds 4 blocks",
        ),
        (Shrinking, "test_max_blocks_is_monotone", "for fewer tokens"),
        (
            Greedy,
            "test_max_blocks_is_monotone",
            r"max_blocks\(0, 1\) is 1, but the table has fewer entries",
        ),
        (Chunkless, "test_max_blocks_is_monotone", r"for the growing chunks \[1, 2"),
    ],
)
def test_wrong_counts_of_blocks_are_found(cls, test, message):
    kit, spec = kind_of(cls)
    with pytest.raises(AssertionError, match=message):
        getattr(kit, test)(spec)


# Drafters


class Repeat(Drafter):
    """It is right."""

    def propose(self, token_ids):
        return [int(token_ids[-1])]


class Meddling(Repeat):
    """It writes into what was drawn before."""

    def finish(self, inputs, hidden_states, result, step):
        super().finish(inputs, hidden_states, result, step)
        inputs.histories.token_ids[:] = 7


class Careless(Repeat):
    """It sorts the worker's own token ids."""

    def propose(self, token_ids):
        token_ids.sort()
        return super().propose(token_ids)


class Numbers(Drafter):
    """Its drafts are numbers of numpy."""

    def propose(self, token_ids):
        return list(np.asarray(token_ids[-1:], np.int64))


class Presuming(Drafter):
    """It thinks that all sequences are long."""

    def propose(self, token_ids):
        return [int(token_ids[-3])]


class Foreign(Drafter):
    """Its drafts are of another vocabulary."""

    def propose(self, token_ids):
        # Not yet in the steps that the engine tries as it starts.
        return [1000] if len(token_ids) > 24 else []


class Forgetful(Drafter):
    """It has forgotten a sequence that comes back."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.gone = set()

    def remove(self, seq_id):
        self.gone.add(seq_id)

    def add(self, seq):
        if seq.seq_id in self.gone:
            raise KeyError(seq.seq_id)

    def propose(self, token_ids):
        return [int(token_ids[-1])]


class Silent(Drafter):
    """It has no guess."""

    def propose(self, token_ids):
        return []


class Neighbour(Repeat):
    """It gives each sequence the drafts of another one."""

    def finish(self, inputs, hidden_states, result, step):
        super().finish(inputs, hidden_states, result, step)
        ids = list(result.drafts)
        drafts = list(result.drafts.values())
        result.drafts.update(zip(ids, drafts[1:] + drafts[:1], strict=True))


class Useless(Drafter):
    """Its drafts are tokens that are never drawn."""

    def propose(self, token_ids):
        return [(int(token_ids[-1]) + 137) % 272]


class Drafters:
    name = "guessing"

    @hookimpl
    def toolkit_register_drafters(self, drafters):
        for cls in (
            Repeat,
            Meddling,
            Careless,
            Numbers,
            Presuming,
            Foreign,
            Forgetful,
            Silent,
            Neighbour,
            Useless,
        ):
            drafters.add(cls.__name__, f"{__name__}:{cls.__name__}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(write_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def check_drafter(llama, monkeypatch):
    """check_drafter(class, name of a test, course) runs that test of the kit."""

    def run(cls, test, course="together"):
        kit = type(
            "KitOf", (DrafterConformance,), {"drafter": cls.__name__, "plugins": [Drafters()]}
        )()
        if test == "test_tokens_are_those_without_drafts":
            kit.test_tokens_are_those_without_drafts(
                llama, kit.generate(llama, drafter=None), kit.parameters()["course"][course]
            )
        else:
            getattr(kit, test)(llama, monkeypatch)

    return run


@pytest.mark.parametrize(
    "test", ["test_tokens_are_those_without_drafts", "test_it_drafts", "test_its_drafts_count"]
)
def test_a_right_drafter_passes(check_drafter, test):
    check_drafter(Repeat, test)


@pytest.mark.parametrize(
    ("cls", "test", "message"),
    [
        (
            Meddling,
            "test_tokens_are_those_without_drafts",
            "plugin 'guessing' .*ValueError: .*read-only",
        ),
        (
            Presuming,
            "test_tokens_are_those_without_drafts",
            "failed in drafter 'Presuming': IndexError",
        ),
        (
            Careless,
            "test_tokens_are_those_without_drafts",
            r"failed in drafter 'Careless': ValueError: .*read-only",
        ),
        (
            Numbers,
            "test_tokens_are_those_without_drafts",
            r"Numbers has proposed \[.+\]: no list of token ids",
        ),
        (
            Foreign,
            "test_tokens_are_those_without_drafts",
            r"Foreign has proposed \[1000\]: no list of token ids",
        ),
        (Silent, "test_it_drafts", "it has drafted nothing"),
        (Neighbour, "test_its_drafts_count", "drafts are taken of sequences side by side, but"),
        (Useless, "test_its_drafts_count", "of 4 greedy sequences, none took a single draft"),
    ],
)
def test_a_wrong_drafter_is_found(check_drafter, cls, test, message):
    with pytest.raises(AssertionError, match=message):
        check_drafter(cls, test)


def test_a_drafter_that_cannot_meet_a_sequence_again_is_found(check_drafter):
    check_drafter(Forgetful, "test_tokens_are_those_without_drafts")
    with pytest.raises(AssertionError, match=r"failed in drafter 'Forgetful': KeyError"):
        check_drafter(Forgetful, "test_tokens_are_those_without_drafts", "preempted")
