"""Heads at rest: what following single tokens may take, and what a head does that has stopped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from draft_heads import Eagle3, make_target, randomize, save_head, start
from toolkit_lm import SamplingParams
from toolkit_lm.scheduler.draft_budget import DraftBudget
from toolkit_lm_drafters import following as module
from toolkit_lm_drafters.following import Following


class Clock:
    """Time that goes on as a test says."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def steps(self, following, count, took, between):
        """Steps that are followed. Returns whether following has ended with the last."""
        ended = False
        for _ in range(count):
            self.now += between - took
            begun = self.now
            self.now += took
            ended = following.followed(begun)
        return ended


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_it_goes_on_where_steps_are_long(clock):
    following = Following()
    assert not clock.steps(following, 200, 0.0001, 0.03)
    assert following.is_on


def test_it_ends_where_it_takes_much_of_a_step_and_comes_again_once_that_is_paid(clock):
    following = Following()
    assert clock.steps(following, 9, 0.0001, 0.001) and not following.is_on
    following.added()
    assert not following.is_on
    clock.now += 301 * 8 * 0.0001
    following.added()
    assert following.is_on
    # It is judged later then, so that a try may come.
    assert not clock.steps(following, 64, 0.0001, 0.001)
    assert clock.steps(following, 1, 0.0001, 0.001) and not following.is_on


def test_one_step_that_was_interrupted_ends_nothing(clock):
    following = Following()
    clock.steps(following, 4, 0.0001, 0.03)
    clock.steps(following, 1, 0.5, 0.6)
    clock.steps(following, 20, 0.0001, 0.03)
    assert following.is_on


def test_steps_between_two_rests_do_not_count(clock):
    following = Following()
    for _ in range(9):
        assert not clock.steps(following, 8, 0.0001, 0.001)
        following.asked()
    assert following.is_on


def test_a_head_that_has_stopped_drafts_for_later_sequences_alone(monkeypatch, tmp_path):
    """And taps nothing; tokens are the same."""
    target = make_target(tmp_path / "target")
    path = save_head(randomize(Eagle3(target)), tmp_path / "head")
    asks = []
    seen = []

    def begin_step(self, running):
        self.is_asking = bool(asks)
        self.holds = True
        self.limits = dict.fromkeys((seq for one in running for seq in one.seq_ids), 2)

    def generate(llm, count):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": list(range(3, 20))}
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.error is None
        return output.outputs[0].token_ids, output.metrics.num_draft_tokens or 0

    with start(str(tmp_path / "target"), None) as llm:
        tokens, _ = generate(llm, 30)
    monkeypatch.setattr(DraftBudget, "begin_step", begin_step)
    monkeypatch.setattr(DraftBudget, "observe", lambda *_: None)
    # Any time is too much, and none pays for it.
    monkeypatch.setattr(module, "_SHARE", 0.0)
    monkeypatch.setattr(module, "_PAID", 1e9)
    with start(str(tmp_path / "target"), "eagle", [f"model={path}"], draft_budget="auto") as llm:
        runner = llm.engine.client.core.executor.runner
        drafter = runner.parts.by_name["drafter"]._drafters["eagle"]
        follow = drafter._follow
        monkeypatch.setattr(drafter, "_follow", lambda *them: seen.append(follow(*them)))
        assert generate(llm, 30) == (tokens, 0)
        assert not drafter.follows_decodes and not runner._taps.are_read
        # The prompt's chunks, and the steps up to the judgement.
        assert len(seen) <= 3 + 9
        assert generate(llm, 30) == (tokens, 0)
        # A prompt is followed, so that a sequence that is asked for from its beginning has all.
        asks.append(True)
        found, num_drafts = generate(llm, 30)
        assert found == tokens and num_drafts > 10
        # One that has a gap gets none.
        scheduled = llm.engine.client.core.scheduler
        asks.clear()
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
        llm.engine.add_request("gap", {"prompt_token_ids": list(range(3, 20))}, params)
        while len(llm.engine.step()) == 0 or len(_row(scheduled).token_ids) < 24:
            pass
        asks.append(True)
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        last = outputs[-1]
        assert list(last.outputs[0].token_ids) == list(tokens)
        assert not last.metrics.num_draft_tokens


def _row(scheduler):
    [sequence] = scheduler.roster.sequences.values()
    return sequence
