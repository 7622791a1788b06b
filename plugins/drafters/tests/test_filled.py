"""Prefixes that a draft model has read, and prompts that it reads only once drafts are wanted."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_draft_model import write
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.runner.step_run import Run
from toolkit_lm.scheduler.draft_budget import DraftBudget
from toolkit_lm_drafters import filled as module
from toolkit_lm_drafters.filled import FilledPrefixes

PROMPT = [3 + (5 * i) % 40 for i in range(40)]


def tokens(*numbers):
    return np.array(numbers, np.int32)


def test_a_prefix_is_known_by_all_of_its_tokens():
    prefixes = FilledPrefixes()
    line = np.arange(100, dtype=np.int32)
    prefixes.add(1, line, 50)
    assert prefixes.count(line) == 48
    assert prefixes.count(line[:47]) == 32
    assert prefixes.count(tokens(7, *line[1:])) == 0
    assert prefixes.count(tokens(*line[:20], 7, *line[21:])) == 16
    prefixes.add(1, line, 96)
    assert prefixes.count(line) == 96
    prefixes.remove(1)
    assert prefixes.count(line) == 96, "the prefix stays"
    prefixes.leave(line[:70], 40)
    assert prefixes.count(line) == 32, "the piece that the chunk begins in is gone, too"


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 4)
    prefixes = FilledPrefixes()
    lines = [np.arange(start, start + 32, dtype=np.int32) for start in (0, 100, 200)]
    for seq_id, line in enumerate(lines):
        prefixes.add(seq_id, line, 32)
    assert [prefixes.count(line) for line in lines] == [0, 32, 32]


def test_it_says_what_a_plain_table_says():
    draws = random.Random(5)
    prefixes = FilledPrefixes()
    table: set[bytes] = set()
    for seq_id in range(200):
        line = np.repeat(tokens(*(draws.randrange(2) for _ in range(6))), 16)
        end = draws.randrange(len(line) + 1)
        pieces = [line[: 16 * n].tobytes() for n in range(1, len(line) // 16 + 1)]
        expected = 0
        while expected < len(pieces) and pieces[expected] in table:
            expected += 1
        assert prefixes.count(line) == 16 * expected
        if seq_id % 3:
            prefixes.add(seq_id, line, end)
            table.update(pieces[: end // 16])
        else:
            prefixes.leave(line, end)
            table.difference_update(pieces[end // 16 :])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), hidden_size=64, num_hidden_layers=2)


@pytest.fixture
def passes(monkeypatch):
    """(start, tokens) of each row of each pass of the draft model."""
    found = []
    forward = Run.forward

    def counting(self, model, rows, tokens, start, **arguments):
        found.append([(int(at), len(ids)) for at, ids in zip(start, tokens, strict=True)])
        return forward(self, model, rows, tokens, start, **arguments)

    monkeypatch.setattr(Run, "forward", counting)
    return found


@pytest.fixture
def asks(monkeypatch):
    """Whether drafters are asked: the value of "now"."""
    said = {"now": False}

    def begin_step(self, running):
        self.is_asking = self.holds = said["now"]
        for request in running:
            request.needs_tokens = said["now"]
        self.limits = {}

    monkeypatch.setattr(DraftBudget, "begin_step", begin_step)
    monkeypatch.setattr(DraftBudget, "observe", lambda *_: None)
    return said


def start(target, **options):
    return LLM(
        target,
        dtype="float32",
        renderer="tokens",
        max_model_len=64,
        num_kv_blocks=128,
        max_num_seqs=4,
        **{"drafter": "draft_model", "plugin_option": [f"drafters.model={target}"]} | options,
    )


def generate(llm, prompt, count=8):
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.error is None
    return list(output.outputs[0].token_ids), output.metrics


def test_a_draft_model_at_rest_computes_nothing(target, passes, asks):
    with start(target, max_num_batched_tokens=16) as llm:
        passes.clear()
        for prompt in (PROMPT, PROMPT, PROMPT[::-1]):
            generate(llm, prompt)
        assert not passes


@pytest.mark.parametrize("first", [True, False])
def test_what_a_cached_prefix_lacks_is_read_and_nothing_else(target, passes, asks, first):
    """The twin's drafts are all accepted, whoever has computed the prefix."""
    with start(target) as llm:
        asks["now"] = first
        without, _ = generate(llm, PROMPT)
        asks["now"] = True
        passes.clear()
        _, metrics = generate(llm, [*PROMPT, *without, 5])
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
    begin, _ = min(row for rows in passes for row in rows)
    assert begin == (32 if first else 0)


def test_a_prompt_that_is_computed_anew_at_rest_is_read_again(target, passes, asks):
    """The prefix's blocks were filled, and went."""
    with start(target) as llm:
        asks["now"] = True
        generate(llm, PROMPT)
        llm.engine.client.core.reset_prefix_cache()
        asks["now"] = False
        generate(llm, PROMPT)
        asks["now"] = True
        passes.clear()
        _, metrics = generate(llm, [*PROMPT, 5])
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
    assert min(row for rows in passes for row in rows)[0] == 0


def test_what_was_missed_is_read_within_a_steps_budget(target, passes, asks):
    """Rows that do not fit are left to later steps."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    with start(target, max_num_batched_tokens=48) as llm:
        for row in range(4):
            llm.engine.add_request(str(row), {"prompt_token_ids": [3 + row, *PROMPT[1:]]}, params)
        sequences = llm.engine.client.core.scheduler.roster.sequences
        while not sequences or min(len(seq.token_ids) for seq in sequences.values()) < 44:
            llm.engine.step()
        passes.clear()
        asks["now"] = True
        outputs = []
        while llm.engine.has_unfinished_requests():
            before = len(passes)
            outputs += llm.engine.step()
            # The drafts after the first are of one token each.
            read = sum(count for rows in passes[before:] for _, count in rows if count > 8)
            assert read <= 48 + 16
    last = {output.request_id: output for output in outputs}
    for output in last.values():
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 0
