"""The Grafana board, the alerts and the autoscaler ask for metrics that exist."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from toolkit_lm.events import RequestEvent, StepEvent
from toolkit_lm.frontend import Health
from toolkit_lm_server.metric_names import VLLM_NAMES
from toolkit_lm_server.metrics import Metrics

FILE = Path(__file__).parents[3] / "deploy" / "grafana" / "toolkit-lm.json"
CHART = FILE.parents[1] / "helm" / "toolkit-lm"
ENDED = {"request_id": "1", "time": 2.0, "arrival_time": 1.0, "num_prompt_tokens": 1}
OF_SCRAPES = {"instance", "job", "le"}
"""Labels that a series has from elsewhere."""


class Engine:
    num_restarts = num_queued_tokens = 0
    served_model_name = "tiny"

    def __init__(self) -> None:
        self.engine = self.client = self.process = self
        self.pid = os.getpid()

    def health(self) -> Health:
        return Health("ready")


def samples() -> dict[str, set[str]]:
    """Each series' name, and its labels."""
    metrics = Metrics()
    metrics.observe(Engine())
    metrics.answered("/v1/models", "GET", 200, 0.1)
    metrics.refused(429)
    for kind, reason in (("finished", "stop"), ("aborted", "timeout")):
        metrics.toolkit_event(RequestEvent(kind=kind, finish_reason=reason, **ENDED))
    drafts = {"drafts": [(2, 1)], "drafters": [("ngram", 2, 1)]}
    step = StepEvent(time=2.0, duration=1.0, num_tokens=3, num_compilations=0, **drafts)
    metrics.toolkit_event(step)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


TOLD = samples()


@pytest.fixture(scope="module")
def board():
    return json.loads(FILE.read_text())


def expressions(board) -> list[str]:
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return asked + [
        one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"
    ]


def selectors(expression: str) -> list[tuple[list[str], set[str]]]:
    """The names that each selector takes, and the labels that it compares."""
    found = []
    for name, inside in re.findall(r"([a-z0-9_:]*)\{([^}]*)\}", expression):
        labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', inside))
        names = labels.pop("__name__", name).split("|")
        found.append((names, set(labels)))
    return found


def test_the_board_asks_for_what_exists(board):
    asked = [one for expression in expressions(board) for one in selectors(expression)]
    assert len(asked) > 60
    for names, labels in asked:
        assert [name for name in names if name not in TOLD] == []
        for name in names:
            assert labels - TOLD[name] <= OF_SCRAPES, name


def test_no_figure_is_asked_for_by_two_names(board):
    """Sums would count it twice."""
    for expression in expressions(board):
        for names, _ in selectors(expression):
            assert len(names) == 1 and not names[0].startswith("vllm:"), expression


def test_what_is_grouped_by_is_a_label(board):
    for expression in expressions(board):
        labels = set().union(
            *(TOLD[name] for names, _ in selectors(expression) for name in names),
            OF_SCRAPES,
        )
        for group in re.findall(r"\bby \(([\w, ]+)\)", expression):
            assert set(group.split(", ")) <= labels, expression


def test_all_that_vllm_has_is_shown(board):
    shown = {
        name
        for expression in expressions(board)
        for names, _ in selectors(expression)
        for name in names
    }
    missing = [
        name
        for name in VLLM_NAMES
        if not any(one.startswith(f"toolkit_lm_{name}") for one in shown)
    ]
    # Figures of single requests, or whose labels are what they tell.
    of_requests = ["request_sequences", "request_max_tokens", "request_preemptions"]
    infos = ["lora_requests_info", "engine_sleep_state", "kv_cache_info"]
    assert missing == ["request_inference_time_seconds", *of_requests, *infos]


def test_the_board_is_well_formed(board):
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert board["id"] is None and board["uid"] == "toolkit-lm"
    variables = {one["name"] for one in board["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panels, board["templating"]]))) - {"__all"}
    assert used == variables
    places = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
        if panel["type"] != "row":
            assert (
                panel["title"]
                and panel["targets"]
                and panel["datasource"]["uid"] == "${datasource}"
            )
            assert all(
                target["expr"].count("(") == target["expr"].count(")")
                for target in panel["targets"]
            )


def alerts() -> list[dict]:
    groups = yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_exists(rule):
    expression = rule["expr"]
    asked = selectors(expression)
    assert asked and len(re.findall(r"toolkit_lm_\w+", expression)) == len(asked)
    labels = set(OF_SCRAPES)
    for names, compared in asked:
        for name in names:
            assert name in TOLD and compared - TOLD[name] <= OF_SCRAPES, name
            labels |= TOLD[name]
    for group in re.findall(r"\bby \(([\w, ]+)\)", expression):
        assert set(group.split(", ")) <= labels, expression
    assert expression.count("(") == expression.count(")")
    text = json.dumps(rule["annotations"])
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_alerts_have_names_of_their_own_and_the_autoscalers_metric_exists():
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 5
    asked = re.findall(r"toolkit_lm_\w+", (CHART / "templates" / "autoscaler.yaml").read_text())
    signals = ("estimated_wait_seconds", "batch_usage_ratio", "kv_cache_usage_ratio")
    # Both kinds ask for the same.
    assert asked == [f"toolkit_lm_{name}" for name in signals] * 2
    assert set(asked) <= set(TOLD)
