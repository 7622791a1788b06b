"""Every family gives what transformers gives, without an engine: in one forward pass, in a
pipeline, over two ranks, of older files.

The whole engine is the matter of test_decoder_conformance.py.
"""

import json

import pytest
import torch
from decoder_families import (
    CASES,
    FACTORS,
    VARIANTS,
    make_family,
    make_model,
    our_class,
    reference_logits,
    save_random,
)
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm_devkit import (
    Computed,
    assert_bf16_error,
    hidden_states,
    load_checkpoint,
    logits_of,
    logits_of_ranks,
)

INPUT_IDS = torch.arange(3, 40)
FIRST_CASES = [(architecture, next(iter(variants))) for architecture, variants in VARIANTS.items()]
# Their layers have embeddings of tokens, and take none that are given.
READ_TOKENS = {"Gemma3nForCausalLM"}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function (architecture, variant) -> (folder, transformers model)."""
    made = {}

    def make(architecture, variant):
        if (architecture, variant) not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture, variant] = folder, make_family(architecture, variant, folder)
        return made[architecture, variant]

    return make


def assert_same_logprobs(ours, theirs):
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_one_forward_pass(make, architecture, variant):
    folder, theirs = make(architecture, variant)
    expected = reference_logits(theirs, INPUT_IDS)
    assert expected.std() > 0.1
    assert_same_logprobs(
        logits_of([load_checkpoint(our_class(architecture), folder, max_model_len=96)], INPUT_IDS),
        expected,
    )


def test_gates_as_sparse_as_trained_ones(tmp_path):
    """Where so few gates are left, rounding decides which: both sides are compared with float64."""
    fields = {
        **VARIANTS["Gemma3nForCausalLM"]["sparse gates, two streams"],
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "intermediate_size": 256,
    }
    theirs = make_model("Gemma3nForCausalLM", fields)
    save_random(tmp_path, theirs)
    ours = logits_of([load_checkpoint(our_class("Gemma3nForCausalLM"), tmp_path)], INPUT_IDS)
    results = reference_logits(theirs, INPUT_IDS)
    exact = reference_logits(theirs.double(), INPUT_IDS)
    assert_bf16_error([ours], [results], [exact])


@pytest.mark.parametrize(("architecture", "variant"), FIRST_CASES)
def test_pipeline_stages(make, architecture, variant):
    folder, theirs = make(architecture, variant)
    stages = [
        load_checkpoint(our_class(architecture), folder, rank=rank, pipeline_parallel_size=2)
        for rank in (0, 1)
    ]
    assert_same_logprobs(logits_of(stages, INPUT_IDS), reference_logits(theirs, INPUT_IDS))


@pytest.mark.parametrize(
    ("architecture", "variant"), [case for case in FIRST_CASES if case[0] not in READ_TOKENS]
)
def test_embeddings_in_the_place_of_tokens(make, architecture, variant):
    """Embeddings, such as images', are used instead of the tokens. Later stages of a pipeline do
    not need them."""
    folder, _ = make(architecture, variant)
    stages = [
        load_checkpoint(our_class(architecture), folder, rank=rank, pipeline_parallel_size=2)
        for rank in (0, 1)
    ]
    embeds = stages[0].embed_input_ids(INPUT_IDS)
    [expected] = hidden_states(stages, [INPUT_IDS])
    [ours] = hidden_states(stages, [torch.zeros_like(INPUT_IDS)], inputs_embeds=embeds.clone())
    assert torch.equal(ours, expected)
    [others] = hidden_states(stages, [INPUT_IDS], inputs_embeds=embeds.flip(0))
    assert not torch.allclose(others, expected)


@pytest.mark.slow
def test_two_ranks(make):
    work = [Computed(our_class(case[0]), make(*case)[0]) for case in FIRST_CASES]
    for case, of_ranks in zip(FIRST_CASES, logits_of_ranks(work, INPUT_IDS), strict=True):
        expected = reference_logits(make(*case)[1], INPUT_IDS)
        for ours in of_ranks:
            assert_same_logprobs(ours, expected)


def edited(folder, tmp_path, change, **config_changes):
    """A copy of a checkpoint with other weights (`change` maps the tensors) and config; a value of
    None takes a key out."""
    values = json.loads((folder / "config.json").read_text()) | config_changes
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    return tmp_path


def as_older_gpt2(tensors):
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return tensors | {
        "h.0.attn.bias": torch.ones(1, 1, 128, 128),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }


def as_older_opt(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def unchanged(tensors):
    return tensors


@pytest.mark.parametrize(
    ("architecture", "variant", "change", "config_changes"),
    [
        ("GPT2LMHeadModel", "plain", as_older_gpt2, {"tie_word_embeddings": None}),
        (
            "OPTForCausalLM",
            "norms first",
            as_older_opt,
            {"tie_word_embeddings": None, "word_embed_proj_dim": None},
        ),
        (
            "Gemma2ForCausalLM",
            "soft caps",
            unchanged,
            {"tie_word_embeddings": None, "layer_types": None},
        ),
        (
            "Gemma3ForCausalLM",
            "six layers",
            unchanged,
            {"rope_parameters": None, "layer_types": None},
        ),
        (
            "Gemma3ForCausalLM",
            "two rotary embeddings",
            unchanged,
            {
                "rope_parameters": None,
                "rope_theta": 20000.0,
                "rope_local_base_freq": 500.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ("Qwen2ForCausalLM", "windows in upper layers", unchanged, {"layer_types": None}),
        # A window that is stated and switched off.
        (
            "Qwen2ForCausalLM",
            "no window",
            unchanged,
            {"layer_types": None, "sliding_window": 8, "max_window_layers": 1},
        ),
        (
            "Phi3ForCausalLM",
            "short longrope, partial",
            unchanged,
            {
                "rope_parameters": None,
                "partial_rotary_factor": 0.75,
                "rope_scaling": {"type": "su", **FACTORS},
            },
        ),
    ],
)
def test_checkpoints_of_older_releases(
    make, tmp_path, architecture, variant, change, config_changes
):
    folder, theirs = make(architecture, variant)
    ours = load_checkpoint(
        our_class(architecture),
        edited(folder, tmp_path, change, **config_changes),
        max_model_len=96,
    )
    assert_same_logprobs(logits_of([ours], INPUT_IDS), reference_logits(theirs, INPUT_IDS))


@pytest.mark.parametrize(
    ("architecture", "config_changes", "error", "message"),
    [
        (
            "Gemma2ForCausalLM",
            {"use_bidirectional_attention": True},
            UnsupportedError,
            "'use_bidirectional_attention' makes",
        ),
        ("Gemma2ForCausalLM", {"sliding_window": None}, CheckpointError, "no 'sliding_window'"),
        (
            "Gemma3ForCausalLM",
            {"layer_types": ["full_attention"]},
            CheckpointError,
            "one of full_attention, sliding_attention for layer 1, not None",
        ),
        (
            "Gemma3ForCausalLM",
            {"layer_types": ["chunked"] * 3},
            CheckpointError,
            "for layer 0, not 'chunked'",
        ),
        (
            "GPT2LMHeadModel",
            {"add_cross_attention": True},
            UnsupportedError,
            "'add_cross_attention' makes",
        ),
    ],
)
def test_what_a_family_does_not_do_is_refused(
    make, tmp_path, architecture, config_changes, error, message
):
    folder = edited(
        make(architecture, next(iter(VARIANTS[architecture])))[0],
        tmp_path,
        unchanged,
        **config_changes,
    )
    with pytest.raises(error, match=message):
        load_checkpoint(our_class(architecture), folder)
