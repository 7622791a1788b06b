"""The objects that the scheduler is made of, one by one."""

from __future__ import annotations

import math
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from toolkit_lm.config import PluginsConfig, SchedulerConfig
from toolkit_lm.errors import ConfigError, PluginError
from toolkit_lm.messages import Candidates, EngineRequest, ScheduledSequence, StepPlan
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.scheduler import Request
from toolkit_lm.scheduler.beam_step import BeamStep
from toolkit_lm.scheduler.deadlines import Deadlines
from toolkit_lm.scheduler.event_log import EventLog
from toolkit_lm.scheduler.quarantine import Quarantine
from toolkit_lm.scheduler.roster import Roster, SchedulingPolicy, load_policy, priority
from toolkit_lm.scheduler.rules import RequestRules


def make_request(
    request_id: str = "r",
    prompt=(1, 2, 3),
    eos=(),
    max_output_tokens: int = 4,
    chunked: bool = True,
    **fields,
) -> Request:
    params = fields.pop("params", SamplingParams())
    needs_tokens = fields.pop("needs_tokens", False)
    message = EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=params,
        eos_token_ids=list(eos),
        max_output_tokens=max_output_tokens,
        **fields,
    )
    return Request(message, count(), RequestRules(chunked=chunked, needs_tokens=needs_tokens))


class TestTake:
    """Sequence.take: what was drawn takes the place of a placeholder, and may end the sequence."""

    @pytest.mark.parametrize(
        ("tokens", "reason"),
        [([9], None), ([5], "stop"), ([6], "stop"), ([9, 9, 9, 9], "length"), ([9, 5], "stop")],
    )
    def test_whether_and_why_it_has_ended(self, tokens, reason):
        seq = make_request(eos=[5], params=SamplingParams(stop_token_ids=[6])).leader
        seq.num_placeholders = 1
        assert seq.append_sampled(tokens, []) == reason
        assert (seq.token_ids, seq.num_placeholders, seq.num_tokens) == (
            [1, 2, 3, *tokens],
            0,
            3 + len(tokens),
        )

    def test_the_last_token_that_is_allowed_may_be_a_stop(self):
        seq = make_request(eos=[5], max_output_tokens=1).leader
        assert seq.append_sampled([5], []) == "stop"

    def test_only_a_stop_token_is_named(self):
        seq = make_request(eos=[5], params=SamplingParams(stop_token_ids=[6])).leader
        assert seq.output("stop", [6], [], []).stop_token_id == 6
        assert seq.output("stop", [5], [], []).stop_token_id is None

    def test_ignore_eos(self):
        assert (
            make_request(eos=[5], params=SamplingParams(ignore_eos=True)).leader.append_sampled(
                [5], []
            )
            is None
        )

    def test_nothing_follows_the_token_that_ends_it(self):
        seq = make_request(eos=[5], params=SamplingParams(stop_token_ids=[6])).leader
        assert seq.append_sampled([9, 6, 9], []) == "stop"
        assert seq.token_ids == [1, 2, 3, 9, 6]
        seq = make_request(max_output_tokens=2).leader
        assert seq.append_sampled([9, 9, 9], []) == "length"
        assert seq.token_ids == [1, 2, 3, 9, 9]

    def test_what_was_computed_of_rejected_drafts_counts_no_more(self):
        seq = make_request(needs_tokens=True).leader
        seq.num_computed_tokens = 3 + 3
        seq.num_placeholders = 1
        assert seq.num_kept_tokens == 3
        assert seq.append_sampled([8, 9], []) is None
        assert (seq.num_computed_tokens, seq.num_pending_tokens) == (4, 1)

    @pytest.mark.parametrize(
        ("drafts", "kept"),
        [([], []), ([7, 8], [7, 8]), ([7] * 9, [7, 7]), ([7, 5, 8], [7]), ([6, 7], [])],
    )
    def test_drafts_are_cut_where_the_sequence_ends(self, drafts, kept):
        seq = make_request(eos=[5], params=SamplingParams(stop_token_ids=[6])).leader
        seq.num_placeholders = 1
        seq.append_sampled([9], drafts)
        assert seq.drafts == kept

    def test_what_is_computed_on_the_way_takes_no_drafts(self):
        """A later step has the token's place already."""
        seq = make_request().leader
        seq.num_placeholders = 2
        seq.append_sampled([9], [7])
        assert seq.drafts == []

    def test_what_cannot_go_back_takes_no_drafts(self):
        request = make_request()
        for most in (0, 1):
            request.max_drafts = most
            request.leader.num_placeholders = 1
            request.leader.append_sampled([9], [7, 8])
            assert request.leader.drafts == [7][:most]


class TestTokenRanges:
    def test_drafts_are_computed_as_far_as_they_fit(self):
        request = make_request(needs_tokens=True)
        request.leader.drafts = [7, 8]
        assert request.token_ranges(9) == [(0, 0, 5)]
        assert request.token_ranges(4) == [(0, 0, 4)]
        assert make_request(needs_tokens=True, chunkable=False).token_ranges(2) == []

    def test_a_prompt_is_cut_where_it_may_be(self):
        assert make_request().token_ranges(2) == [(0, 0, 2)]
        assert make_request(chunkable=False).token_ranges(2) == []
        assert make_request(chunked=False).token_ranges(2) == []
        assert make_request(chunkable=False).token_ranges(3) == [(0, 0, 3)]

    def test_the_others_wait_for_the_leader(self):
        request = make_request(params=SamplingParams(n=3))
        assert request.token_ranges(99) == [(0, 0, 3)]
        request.sequences[1].num_computed_tokens = 2
        assert request.token_ranges(99) == [(0, 0, 3), (1, 2, 3)]
        assert request.token_ranges(3) == [(0, 0, 3)]

    def test_what_waits_for_its_last_token_computes_nothing(self):
        request = make_request(max_output_tokens=1)
        seq = request.leader
        seq.num_computed_tokens = 3
        seq.num_placeholders = 1
        assert request.token_ranges(99) == []

    def test_what_draws_no_token_computes_its_whole_prompt(self):
        request = make_request(max_output_tokens=0, draws_tokens=False)
        assert request.token_ranges(99) == [(0, 0, 3)]

    def test_nobody_has_checked_it(self):
        with pytest.raises(AssertionError, match="the front has not held"):
            make_request(max_output_tokens=0)


class TestQuarantine:
    def test_one_after_the_other(self):
        quarantine = Quarantine()
        quarantine.isolate(["a", "b", "c"])
        # One that waits ends; then the first has drawn a token.
        assert not quarantine.release("b")
        assert quarantine.release("a")
        assert quarantine.quarantined == ["c"]
        assert not quarantine.release("a")

    def test_a_new_failure_takes_the_place_of_the_last(self):
        quarantine = Quarantine()
        quarantine.isolate(["a", "b"])
        quarantine.isolate(["c"])
        assert quarantine.quarantined == ["c"]


class TestEventLog:
    def test_events_are_given_away_once_and_in_order(self):
        log = EventLog()
        request = make_request(context={"trace": "1"})
        log.add("queued", request)
        log.scheduled(request)
        request.leader.append_sampled([7], [])
        log.first_token(request)
        log.add("finished", request, "length")
        events = log.drain()
        assert [event.kind for event in events] == [
            "queued",
            "scheduled",
            "first_token",
            "finished",
        ]
        assert [event.num_output_tokens for event in events] == [0, 0, 1, 1]
        assert events[0].scheduled_time is None and events[-1].finish_reason == "length"
        assert (
            request.arrival_time
            < request.scheduled_time
            <= request.first_token_time
            == events[-1].first_token_time
        )
        assert {event.context["trace"] for event in events} == {"1"}
        assert log.drain() == []


class TestDeadlines:
    def test_each_is_named_once(self):
        deadlines = Deadlines()
        assert deadlines.earliest == math.inf
        given = {"c": 3.0, "a": 1.0, "b": 2.0}
        requests = {name: SimpleNamespace(deadline=time) for name, time in given.items()}
        for name, time in given.items():
            deadlines.add(time, name)
        assert deadlines.earliest == 1.0
        assert list(deadlines.passed(0.5, requests)) == []
        assert list(deadlines.passed(2.0, requests)) == [requests["a"], requests["b"]]
        assert deadlines.earliest == 3.0
        assert list(deadlines.passed(9.0, requests)) == [requests["c"]]
        assert deadlines.earliest == math.inf

    def test_those_that_have_ended_are_passed_over(self):
        """Also those whose id another request has now: one that ends later, or never, or that the
        first of two deadlines ends."""
        deadlines = Deadlines()
        for name in ("ended", "later", "never", "again", "again"):
            deadlines.add(1.0, name)
        requests = {
            "later": SimpleNamespace(deadline=5.0),
            "never": SimpleNamespace(deadline=None),
            "again": SimpleNamespace(deadline=1.0),
        }
        found = [requests.popitem()[1] for _ in deadlines.passed(2.0, requests)]
        assert [request.deadline for request in found] == [1.0]


class TestRoster:
    @pytest.fixture
    def roster(self):
        roster = Roster(SchedulingPolicy(SchedulerConfig()))
        ids = count()
        for time, name in ((2.0, "later"), (1.0, "sooner")):
            message = EngineRequest(
                request_id=name,
                prompt_token_ids=[1],
                params=SamplingParams(n=2),
                arrival_time=time,
                max_output_tokens=2,
            )
            roster.add(Request(message, ids, RequestRules()))
        return roster

    def test_both_lists_keep_the_policy_s_order(self, roster):
        assert [request.request_id for request in roster.waiting] == ["sooner", "later"]
        for request in list(roster.waiting)[::-1]:
            roster.start(request)
        assert [request.request_id for request in roster.running] == ["sooner", "later"]
        assert (roster.waiting, roster.num_running) == ([], 4)
        roster.requeue(roster.requests["sooner"])
        assert [request.request_id for request in roster.waiting] == [
            "sooner"
        ] and roster.num_running == 2

    def test_the_worker_forgets_only_what_it_holds(self, roster):
        request = roster.requests["later"]
        roster.start(request)
        first, second = request.sequences
        first.on_worker = True
        roster.requeue(request)
        assert roster.dropped == [first.seq_id] and not first.on_worker
        roster.start(request)
        second.on_worker = True
        roster.remove_sequence(second)
        assert (
            roster.dropped == [first.seq_id, second.seq_id]
            and second.seq_id not in roster.sequences
        )

    def test_after_a_failure_all_wait_and_all_is_dropped(self, roster):
        roster.start(roster.requests["sooner"])
        roster.requeue_all([StepPlan(dropped=[77])])
        assert [request.request_id for request in roster.waiting] == [
            "sooner",
            "later",
        ] and roster.running == []
        assert sorted(roster.dropped) == [0, 1, 2, 3, 77]


def test_prompt_logprobs_that_are_computed_again_come_once():
    request = make_request(prompt=range(10))

    def take(start, num_tokens, known):
        return request.new_prompt_logprobs(
            ScheduledSequence(0, start, num_tokens, [], samples=False), known
        )

    assert take(0, 4, [1, 2, 3, 4]) == [1, 2, 3, 4]
    # It was preempted before these came, and is computed again from its first token; then from
    # where the worker thinks that it stands.
    assert take(0, 6, [1, 2, 3, 4, 5, 6]) == [5, 6]
    assert take(6, 2, [7, 8]) == [7, 8]
    assert take(0, 10, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [9]
    assert request.num_prompt_logprobs == 9


class TestBeamStep:
    @pytest.fixture
    def request_(self):
        return make_request(
            eos=[5],
            max_output_tokens=2,
            params=SamplingParams(use_beam_search=True, n=2, beam_width=2),
        )

    def test_the_next_beams_and_then_the_outputs(self, request_):
        step = BeamStep(request_, request_.search)
        ids = count(10)
        assert step.add(request_.leader, Candidates([7, 8, 9, 4], [-0.5, -1.0, -2.0, -3.0]))
        forks = step.advance(ids)
        assert [
            (fork.parent.seq_id, fork.child.seq_id, fork.child.token_ids[-1], fork.child.logprob)
            for fork in forks
        ] == [
            (0, 10, 7, -0.5),
            (0, 11, 8, -1.0),
        ]
        request_.sequences = request_.unfinished = [fork.child for fork in forks]
        first, second = request_.sequences
        assert not step.add(first, Candidates([1, 2, 3, 4], [-3.0, -4.0, -5.0, -6.0]))
        assert step.add(second, Candidates([5, 2, 3, 4], [-0.1, -4.0, -5.0, -6.0]))
        assert step.advance(ids) == []
        outputs = step.outputs()
        assert [(one.index, one.token_ids, one.finish_reason) for one in outputs] == [
            (0, [8, 5], "stop"),
            (1, [7, 1], "length"),
        ]
        assert [one.cumulative_logprob for one in outputs] == pytest.approx([-1.1, -3.5])

    def test_fewer_than_n_where_no_more_is_left(self, request_):
        step = BeamStep(request_, request_.search)
        assert step.add(request_.leader, Candidates([5], [-0.5]))
        assert step.advance(count(10)) == []
        assert [one.token_ids for one in step.outputs()] == [[5]]


class TestPolicies:
    @pytest.fixture
    def load(self, monkeypatch):
        """Loads a policy that a plugin brings."""

        def load(function):
            monkeypatch.setitem(sys.modules, "policy_under_test", SimpleNamespace(mine=function))
            plugin = SimpleNamespace(name="brings", toolkit_register_scheduling_policies=register)
            policies = Plugins.load(PluginsConfig(plugins=[]), extra=[plugin]).scheduling_policies
            return load_policy(policies, SchedulerConfig(scheduling_policy="mine"))

        @hookimpl
        def register(policies):
            policies.add("mine", "policy_under_test:mine")

        return load

    def order(self, policy, *requests):
        roster = Roster(policy)
        ids = count()
        for name, fields in zip("abcd", requests, strict=False):
            roster.add(
                Request(
                    EngineRequest(
                        request_id=name, params=SamplingParams(), max_output_tokens=2, **fields
                    ),
                    ids,
                    RequestRules(),
                )
            )
        return "".join(request.request_id for request in roster.waiting)

    def test_fcfs(self):
        requests = [
            {"prompt_token_ids": [1], "arrival_time": time, "priority": p}
            for time, p in ((3, 0), (1, 5), (3, -1))
        ]
        assert self.order(SchedulingPolicy(SchedulerConfig()), *requests) == "bac"

    def test_priority(self, load):
        # The first two would be equal as floats.
        numbers = (2**62 + 1, 2**62, -1, -1)
        requests = [
            {"prompt_token_ids": [1], "arrival_time": 9 - i, "priority": p}
            for i, p in enumerate(numbers)
        ]
        assert self.order(load(priority), *requests) == "dcba"

    def test_one_of_a_plugin(self, load):
        requests = [
            {"prompt_token_ids": [1] * length, "arrival_time": 1} for length in (3, 1, 3, 2)
        ]
        assert self.order(load(lambda request: (request.num_prompt_tokens,)), *requests) == "bdac"

    @pytest.mark.parametrize(
        ("policy", "error", "message"),
        [
            (lambda request: request.nothing, AttributeError, "nothing"),
            (lambda request: (math.nan,), ValueError, "its key is"),
            (lambda request: 3, TypeError, "not iterable"),
            (lambda request: ("a",), TypeError, "real number"),
        ],
    )
    def test_what_fails_on_a_request_queues_nothing(self, load, policy, error, message):
        roster = Roster(load(policy))
        with pytest.raises(error, match=message):
            roster.add(make_request())
        assert not roster.requests and not roster.waiting and not roster.sequences

    def test_a_class_of_something_else(self, load):
        with pytest.raises(
            PluginError,
            match=r"policy 'mine': builtins.int is no subclass of "
            r"toolkit_lm.scheduler.SchedulingPolicy",
        ):
            load(int)

    def test_an_unknown_name(self):
        with pytest.raises(
            ConfigError, match=r"no scheduling policy 'fcsf' is registered. Did you mean 'fcfs'\?"
        ):
            load_policy(
                Plugins.load(PluginsConfig(plugins=[])).scheduling_policies,
                SchedulerConfig(scheduling_policy="fcsf"),
            )
