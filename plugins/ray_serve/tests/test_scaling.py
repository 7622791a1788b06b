"""The config, the signals of load, and the policy, without a cluster."""

from __future__ import annotations

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm.events import LoadEvent, RequestEvent
from toolkit_lm_ray_serve import scaling
from toolkit_lm_ray_serve.options import read
from toolkit_lm_ray_serve.scaling import Signals, wanted

MOST = {"wait": 2.0, "fill": 0.8}


@pytest.mark.parametrize(
    ("wait", "fill", "current", "number"),
    [
        ([0.0], [0.0], 1, 1),
        ([0.0], [0.8], 1, 1),
        ([0.0], [1.0], 1, 2),
        ([8.0], [0.1], 1, 4),
        ([0.0, 0.0], [0.9, 0.9], 2, 3),
        ([0.0] * 3, [0.3] * 3, 3, 2),
        ([0.0] * 3, [0.1, 0.1, 0.1], 3, 1),
        ([], [], 2, 0),
        ([1.0], [0.5], 0, 0),
    ],
)
def test_the_number_of_engines(wait, fill, current, number):
    metrics = {
        "wait": dict(enumerate(wait)),
        "fill": dict(enumerate(fill)),
        "running_requests": {0: 900.0},
    }
    assert wanted(metrics, MOST, current) == number


def load(**counts: int) -> LoadEvent:
    whole = {"num_running": 0, "num_waiting": 0, "num_used_blocks": 0, "num_total_blocks": 10}
    return LoadEvent(time=0.0, **{**whole, **counts})


def scheduled() -> RequestEvent:
    return RequestEvent(
        kind="scheduled", request_id="x", time=0.0, arrival_time=0.0, num_prompt_tokens=1
    )


def test_the_signals(monkeypatch):
    now = 100.0
    monkeypatch.setattr(scaling.time, "monotonic", lambda: now)
    signals = Signals(max_num_seqs=4)
    assert signals.stats() == {"wait": 0.0, "fill": 0.0}
    signals.event(load(num_running=1, num_used_blocks=6))
    assert signals.stats() == {"wait": 0.0, "fill": 0.6}
    signals.event(load(num_running=4, num_waiting=3, num_used_blocks=6))
    assert signals.stats() == {"wait": 0.0, "fill": 1.0}
    now = 104.0
    for _ in range(5):
        signals.event(scheduled())
    # 5 in 4 seconds, and one that must come.
    assert signals.stats()["wait"] == pytest.approx(3 * 4 / 6)
    signals.num_before = 3.0
    assert signals.stats()["wait"] == pytest.approx(6 * 4 / 6)
    signals.event(load(num_running=4))
    signals.num_before = 0.0
    assert signals.stats()["wait"] == 0.0


def test_a_wait_that_lasts_is_of_the_latest_pace(monkeypatch):
    now = 0.0
    monkeypatch.setattr(scaling.time, "monotonic", lambda: now)
    signals = Signals(max_num_seqs=1)
    signals.event(load(num_waiting=4))
    waits = []
    for second in range(120):
        now = float(second)
        if second < 60:
            for _ in range(10):
                signals.event(scheduled())
        waits.append(signals.stats()["wait"])
    assert waits[50] == pytest.approx(0.4, abs=0.1)
    assert waits[-1] > 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modle": "tiny"}, "unknown option 'modle'. Did you mean 'model'"),
        ({"scaling.max_replica": 1}, "unknown option 'scaling.max_replica'. Did you mean 'max_re"),
        ({"scaling": {"max_replicas": "x"}}, "scaling.max_replicas must be"),
        ({"scaling": {"min_replicas": 0}}, "scaling.min_replicas must be at least 1"),
        ({"scaling": {"min_replicas": 3}}, "max_replicas .1. must be at least .* .3."),
        ({"router": {"host": "x"}}, "router.host is not yours to set"),
        ({"server": {"api_key": "x"}}, "server.api_key is not yours to set"),
        ({"server": 3}, "'server' must be a dict"),
        ({"data_parallel_size": 2}, "data_parallel_size: in place of it"),
    ],
)
def test_a_wrong_config_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read({"model": "tiny", **config})


def test_a_command_lines_texts_are_read():
    settings = read(
        {"model": "tiny", "max_num_seqs": "4", "scaling.max_replicas": "3", "router.balance": "2"}
    )
    assert settings.engine == {"model": "tiny", "max_num_seqs": "4"}
    assert settings.scaling.max_replicas == 3
    assert settings.router == {"balance": 2.0}
