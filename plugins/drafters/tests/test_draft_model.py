"""The drafter "draft_model": conformance, its checkpoint, and what it refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import PluginWarning
from toolkit_lm.scheduler.draft_budget import DraftBudget
from toolkit_lm_devkit import DraftModelConformance
from toolkit_lm_drafters import model_drafter
from toolkit_lm_drafters.draft_model import DraftModelDrafter
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT = {"prompt_token_ids": [3 + (5 * i) % 40 for i in range(20)]}


def write(folder, *, tokenizer=(), is_finite=True, **fields):
    """A random Llama, with a tokenizer of these words."""
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    config = LlamaConfig(**(shape | fields), eos_token_id=1, dtype="float32")
    model = LlamaForCausalLM(config)
    if not is_finite:
        model.model.norm.weight.data.fill_(torch.nan)
    model.save_pretrained(folder)
    if tokenizer:
        table = {word: index for index, word in enumerate(tokenizer)}
        data = {"model": {"type": "WordLevel", "vocab": table}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(data))
    return str(folder)


def start(target, draft, **options):
    own = [f"drafters.model={draft}", "drafters.num_speculative_tokens=3"]
    plain = {"dtype": "float32", "renderer": "tokens", "max_model_len": 64, "num_kv_blocks": 64}
    plain["draft_budget"] = "all"
    plain["plugin_option"] = own + options.pop("own", [])
    return LLM(target, drafter="draft_model", **(plain | options))


BY_DAY = {"cached", "swapped", "forward", "remove"}


class TestDraftModel(DraftModelConformance):
    """By day some of the courses and faults."""

    drafter = "draft_model"

    @classmethod
    def parameters(cls):
        later = pytest.mark.nightly
        return {
            argument: {
                name: value if name in BY_DAY else pytest.param(value, marks=later)
                for name, value in values.items()
            }
            for argument, values in super().parameters().items()
        }

    @classmethod
    def twin_options(cls, checkpoint):
        return {"plugin_option": [f"drafters.model={checkpoint}"]}

    drafter_options = twin_options


def tokens_of(llm, tokens=12) -> list[int]:
    """Greedy tokens."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), hidden_size=64, num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokens(target):
    with LLM(target, dtype="float32", renderer="tokens", max_model_len=64, num_kv_blocks=64) as llm:
        return tokens_of(llm)


def test_a_smaller_vocabulary_is_the_beginning_of_the_targets(target, tokens, tmp_path):
    """Tokens that the draft model does not know are read as others, and never drafted."""
    with start(target, write(tmp_path, vocab_size=40)) as llm:
        assert tokens_of(llm) == tokens


def test_its_dtype_and_quantization_are_its_own(target, tokens, tmp_path):
    with start(target, write(tmp_path), own=["drafters.dtype=bfloat16"]) as llm:
        assert tokens_of(llm) == tokens
    options = {"own": ["drafters.quantization=int8"], "kernels": "torch"}
    with start(target, write(tmp_path), **options) as llm:
        assert tokens_of(llm) == tokens


def test_tokens_that_it_missed_while_it_rested_are_computed_later(target, tokens, monkeypatch):
    """A draft model that is the target is right again in the first step that asks it."""
    asked = []

    def begin_step(budget, running):
        # Not in the prompt's step, nor in the first ones after it.
        asked.append(None)
        budget.is_asking = len(asked) > 5

    monkeypatch.setattr(DraftBudget, "begin_step", begin_step)
    monkeypatch.setattr(DraftBudget, "observe", lambda *_: None)
    with start(target, target, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == tokens
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens >= 4


def test_a_draft_that_is_not_finite_drops_the_drafter(target, tokens, tmp_path):
    draft = write(tmp_path, is_finite=False)
    with (
        pytest.warns(PluginWarning, match=r"not finite.*is dropped"),
        start(target, draft) as llm,
    ):
        assert tokens_of(llm) == tokens


WORDS = [f"w{index}" for index in range(96)]
WRONG = {
    "larger": ({"vocab_size": 128}, r"different vocabularies: 128 and 96 tokens"),
    "shorter": ({"max_position_embeddings": 32}, r"max_model_len is 64.* has 32 positions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_draft_model_that_does_not_fit_is_named_with_the_target(target, tmp_path, case):
    fields, message = WRONG[case]
    draft = write(tmp_path, **fields)
    with pytest.raises(ConfigError, match=message) as raised:
        start(target, draft)
    assert repr(draft) in str(raised.value) and repr(target) in str(raised.value)


def test_tokenizers_are_compared(tmp_path):
    one = write(tmp_path / "one", tokenizer=WORDS)
    other = write(tmp_path / "other", tokenizer=[*WORDS[:50], "else", *WORDS[51:]])
    with pytest.raises(ConfigError, match=r"token 50 is 'else' of the one, 'w50' of the other"):
        start(one, other)
    # A longer table, as of padding, is no other one.
    with start(one, write(tmp_path / "padded", tokenizer=[*WORDS, "x"], vocab_size=128)) as llm:
        assert tokens_of(llm)


def test_a_missing_draft_model(target):
    with pytest.raises(ConfigError, match=r"needs the draft model: drafters\.model=MODEL"):
        LLM(target, drafter="draft_model", renderer="tokens")
    with pytest.raises(ConfigError, match=r"draft model 'nowhere' and model .*neither a folder"):
        start(target, "nowhere")


def test_what_was_left_out_is_made_up_for(target, monkeypatch):
    """After a long time without drafts, in passes of at most a step's budget."""
    finish = DraftModelDrafter.finish
    accepted = []
    seen = []

    def resting(self, inputs, hidden, result, step):
        seen.append(inputs)
        accepted.extend(
            len(drawn) - 1 - row.num_drafts
            for row, drawn in zip(inputs.plan.scheduled, result.token_ids, strict=True)
            if row.num_drafts
        )
        if len(seen) < 30:
            return self.follow(inputs, hidden, step)
        return finish(self, inputs, hidden, result, step)

    monkeypatch.setattr(model_drafter, "_MOST_KEPT", 2)
    monkeypatch.setattr(DraftModelDrafter, "finish", resting)
    with start(target, target, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        seen.clear()
        tokens_of(llm, 40)
    assert accepted and not any(accepted)


def test_a_model_drafts_no_more_than_is_wanted(tmp_path, monkeypatch):
    """A request without drafts costs no pass of the draft model, beside others or alone."""
    target = write(tmp_path / "target")
    rows: list[int] = []
    run = DraftModelDrafter.run

    def counting(drafter, step, entries, hidden, head):
        rows.append(len(entries.rows))
        return run(drafter, step, entries, hidden, head)

    monkeypatch.setattr(DraftModelDrafter, "run", counting)
    with start(target, target) as llm:

        def generate(*most):
            rows.clear()
            params = [
                SamplingParams(
                    temperature=0,
                    max_tokens=10,
                    ignore_eos=True,
                    extra_args={"max_draft_tokens": count},
                )
                for count in most
            ]
            llm.generate([PROMPT] * len(most), params, use_tqdm=False)
            return list(rows)

        # The prompt's pass, that of a prefix cache, alone.
        assert len(generate(0)) <= 1
        one = generate(1)
        three = generate(3)
        assert len(one) <= 6 and set(one) == {1}
        assert len(three) <= 12
        assert max(generate(0, 3)[1:]) == 1


@pytest.mark.parametrize(
    ("budget", "expected"), [("auto", [0, 1, 4, 2]), ("all", [0, 1, 8, 2])], ids=["auto", "all"]
)
def test_no_row_gets_more_drafts_than_the_mean(budget, expected):
    """A pass for one row takes about as long as one for all, and times are of even rows."""
    config = SimpleNamespace(scheduler=SimpleNamespace(draft_budget=budget))
    drafter = SimpleNamespace(num_drafts=8, config=config)
    for wanted, found in (([0, 1, 2**31, 2], expected), ([0, 0], [0, 0]), ([], [])):
        got = DraftModelDrafter._evened(drafter, np.array(wanted, np.int64))
        assert got.tolist() == found
