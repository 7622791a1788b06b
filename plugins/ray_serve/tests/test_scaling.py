"""The config, the signals of load, and the policy, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm.events import LoadEvent
from toolkit_lm_ray_serve.options import read
from toolkit_lm_ray_serve.scaling import Policy
from toolkit_lm_server.metrics import Metrics

MOST = {"max_wait": 2.0, "max_fill": 0.8}
TARGET = 7
"""Number of engines that Ray Serve aims at, where the policy has no word."""


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
        ([], [], 2, TARGET),
        ([1.0], [0.5], 0, TARGET),
    ],
)
def test_the_number_of_engines(wait, fill, current, number):
    metrics = {
        "wait": dict(enumerate(wait)),
        "fill": dict(enumerate(fill)),
        "running_requests": {0: 900.0},
    }
    context = SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=current, target_num_replicas=TARGET
    )
    assert Policy(**MOST)(context) == (number, {})


def test_nothing_is_known_yet():
    context = SimpleNamespace(
        aggregated_metrics=None, current_num_replicas=2, target_num_replicas=TARGET
    )
    assert Policy(**MOST)(context) == (TARGET, {})


def test_the_signals():
    metrics = Metrics()

    def told(**counts: int) -> dict[str, float]:
        whole = {"num_running": 0, "num_waiting": 0, "num_used_blocks": 0, "num_total_blocks": 10}
        metrics.toolkit_event(LoadEvent(time=0.0, **{**whole, **counts}))
        return signals()

    def signals() -> dict[str, float]:
        return {"wait": metrics.queue_wait.seconds(), "fill": metrics.fill(max_num_seqs=4)}

    assert signals() == {"wait": 0.0, "fill": 0.0}
    assert told(num_running=1, num_used_blocks=6) == {"wait": 0.0, "fill": 0.6}
    assert told(num_running=9, num_used_blocks=6)["fill"] == 1.0
    assert told(num_running=4, num_waiting=3)["fill"] == 1.0
    metrics.queue_wait._since -= 3
    assert signals()["wait"] >= 9.0
    assert told() == {"wait": 0.0, "fill": 0.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modle": "tiny"}, "unknown option 'modle'. Did you mean 'model'"),
        ({"scaling.max_replica": 1}, "unknown option 'max_replica'. Did you mean 'max_re"),
        ({"scaling": {"max_replicas": "x"}}, "scaling.max_replicas must be"),
        ({"scaling": {"min_replicas": 0}}, "scaling.min_replicas must be at least 1"),
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
    options = read(
        {"model": "tiny", "max_num_seqs": "4", "scaling.max_replicas": "3", "router.balance": "2"}
    )
    assert options == {
        "engine": {"model": "tiny", "max_num_seqs": "4"},
        "server": {},
        "router": {"balance": 2.0},
        "scaling": {"max_replicas": 3},
    }


def test_vllms_names_are_known():
    options = read({"model": "tiny", "distributed_executor_backend": "ray", "max_num_seqs": 4})
    assert options["engine"] == {"model": "tiny", "executor": "ray", "max_num_seqs": 4}
