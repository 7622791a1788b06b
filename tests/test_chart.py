"""The Helm chart: what it makes of its values, by the schemas of Kubernetes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from helm_subset import Chart, _parse, merged
from test_deploy import OPTIONS
from toolkit_lm_server.request_log import POLLS

FOLDER = Path(__file__).parents[1] / "deploy" / "helm" / "toolkit-lm"
GPU = yaml.safe_load((FOLDER / "values-gpu.yaml").read_text())
HPA = {"autoscaling": {"enabled": True}}
KEDA = {"autoscaling": {"enabled": True, "kind": "keda"}}
ALL = {
    **HPA,
    "args": ["--max-model-len", "4096"],
    "options": {"MAX_NUM_SEQS": 64},
    "tlsSecret": "certificate",
    "imagePullSecrets": [{"name": "pull"}],
    "nodeSelector": {"disk": "fast"},
    "podAnnotations": {"team": "nlp"},
    "affinity": {"podAntiAffinity": {}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
}
CASES = {"plain": {}, "gpu": GPU, "hpa": HPA, "keda": KEDA, "all": merged(GPU, ALL)}
NONE = {"model": {"claim": ""}, "podDisruptionBudget": {"enabled": False}}
OF_OPERATORS = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
"""Kinds whose schemas their operators bring."""


@pytest.fixture(scope="module")
def chart():
    return Chart(FOLDER)


def by_kind(documents: list[dict]) -> dict[str, dict]:
    assert len({one["kind"] for one in documents}) == len(documents)
    return {one["kind"]: one for one in documents}


def pod_of(documents: list[dict]) -> tuple[dict, dict]:
    """The pod's specification, and its container."""
    spec = by_kind(documents)["Deployment"]["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


@pytest.mark.parametrize("version", ["1.29", "latest"])
@pytest.mark.parametrize("case", [*CASES, "none"])
def test_manifests_fit_the_schemas(chart, case, version):
    """1.29 is the oldest that Chart.yaml allows."""
    version = kubernetes_validate.latest_version() if version == "latest" else version
    documents = chart.render(CASES.get(case, NONE))
    for document in documents:
        if document["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(document, version, strict=True)
    expected = {"Service", "Deployment", "PodDisruptionBudget"}
    more = {
        "hpa": {"HorizontalPodAutoscaler"},
        "keda": {"ScaledObject"},
        "all": {"HorizontalPodAutoscaler", "ServiceMonitor", "PrometheusRule"},
    }
    gone = {"PodDisruptionBudget"} if case == "none" else set()
    assert set(by_kind(documents)) == (expected | more.get(case, set())) - gone


def test_a_gpu_is_freed_before_the_next_pod_needs_it(chart):
    for values, surge, image in ((GPU, 0, "cuda"), ({}, 1, "cpu")):
        documents = chart.render(values)
        spec = by_kind(documents)["Deployment"]["spec"]
        update = spec["strategy"]["rollingUpdate"]
        assert (update["maxSurge"], update["maxUnavailable"]) == (surge, 1 - surge)
        _, container = pod_of(documents)
        assert container["image"] == f"toolkit-lm:0.2.0-{image}"
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == values.get("gpu", 0)
    _, container = pod_of(chart.render({"image": {"tag": "mine"}}))
    assert container["image"] == "toolkit-lm:mine"


@pytest.mark.parametrize("case", CASES)
def test_the_server_has_a_key_and_no_rights(chart, case):
    pod, container = pod_of(chart.render(CASES[case]))
    keys = [one for one in container["env"] if one["name"] == "TOOLKIT_LM_API_KEY"]
    assert keys[0]["valueFrom"]["secretKeyRef"] == {"name": "toolkit-lm", "key": "api-key"}
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["fsGroup"] == 10001
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["automountServiceAccountToken"]


@pytest.mark.parametrize("case", CASES)
def test_variables_are_options_and_probes_are_polls(chart, case):
    _, container = pod_of(chart.render(CASES[case]))
    assert {one["name"] for one in container["env"]} <= {option.env for option in OPTIONS}
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startup": "/ready", "liveness": "/live", "readiness": "/ready"}
    assert set(paths.values()) <= set(POLLS)
    schemes = {probe["httpGet"]["scheme"] for probe in probes.values()}
    assert schemes == ({"HTTPS"} if case == "all" else {"HTTP"})
    startup = probes["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800


@pytest.mark.parametrize(("delay", "timeout"), [(10, 30), (0, 600)])
def test_a_pod_is_not_killed_while_it_drains(chart, delay, timeout):
    """The endpoints forget it within the delay, since readiness is asked more often than that."""
    pod, container = pod_of(chart.render({"drainDelay": delay, "shutdownTimeout": timeout}))
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["TOOLKIT_LM_DRAIN_DELAY"] == str(delay)
    assert values["TOOLKIT_LM_SHUTDOWN_TIMEOUT"] == str(timeout)
    assert pod["terminationGracePeriodSeconds"] > delay + timeout
    probe = container["readinessProbe"]
    assert delay == 0 or probe["periodSeconds"] * probe["failureThreshold"] < delay


def test_the_selectors_find_the_pods(chart):
    found = by_kind(chart.render(CASES["all"], release="a" * 60))
    deployment = found["Deployment"]
    name = deployment["metadata"]["name"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert len(name) == 52
    for kind, selector in (
        ("Deployment", deployment["spec"]["selector"]["matchLabels"]),
        ("Service", found["Service"]["spec"]["selector"]),
        ("PodDisruptionBudget", found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]),
    ):
        assert selector and selector.items() <= labels.items(), kind
    monitored = found["ServiceMonitor"]["spec"]
    assert (
        monitored["selector"]["matchLabels"].items()
        <= found["Service"]["metadata"]["labels"].items()
    )
    assert found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == name
    ports = {port["name"] for port in found["Service"]["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitored["endpoints"]} <= ports
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert found[kind]["metadata"]["labels"]["release"] == "prometheus"
    assert "replicas" not in deployment["spec"]


def test_alerts_are_handed_over_as_they_are(chart):
    spec = by_kind(chart.render(CASES["all"]))["PrometheusRule"]["spec"]
    assert spec == yaml.safe_load((FOLDER / "alerts.yaml").read_text())


def test_keda_asks_for_the_pods_of_the_release(chart):
    spec = by_kind(chart.render(KEDA))["ScaledObject"]["spec"]
    assert spec["scaleTargetRef"] == {"name": "llm"}
    asked = {one["name"]: one["metadata"]["query"] for one in spec["triggers"]}
    pods = '{namespace="models", service="llm"}'
    assert asked == {
        "wait": f"sum(toolkit_lm_estimated_wait_seconds{pods})",
        "batch": f"sum(avg by (pod) (toolkit_lm_batch_usage_ratio{pods}))",
        "kv-cache": f"sum(avg by (pod) (toolkit_lm_kv_cache_usage_ratio{pods}))",
    }


def thresholds(chart, kind: str) -> list[float]:
    """Of the wait, the batch and the KV cache: the most of a pod's figure."""
    spec = by_kind(chart.render({"autoscaling": {"enabled": True, "kind": kind}}))
    if kind == "keda":
        return [
            float(one["metadata"]["threshold"]) for one in spec["ScaledObject"]["spec"]["triggers"]
        ]
    metrics = spec["HorizontalPodAutoscaler"]["spec"]["metrics"]
    return [float(one["pods"]["target"]["averageValue"]) for one in metrics]


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_the_pods_of_the_documents_examples_are_those_of_the_thresholds(chart, kind):
    """Both sum up a figure over pods, divide it by its threshold, and take the greatest."""
    text = (FOLDER.parents[2] / "docs" / "scaling.md").read_text()
    section = text.partition("## Autoscaling")[2].partition("\n## ")[0]
    rows = re.findall(
        r"(?m)^\| ([\d., ]+) s \| ([\d., ]+) \| ([\d., ]+) \| .* \| (\d+) \|$", section
    )
    assert len(rows) >= 4
    for *sums, pods in rows:
        wanted = [
            math.ceil(sum(map(float, told.split(", "))) / most)
            for told, most in zip(sums, thresholds(chart, kind), strict=True)
        ]
        assert max(1, *wanted) == int(pods), sums


def leaves(values: dict, prefix: str = ".Values") -> list[str]:
    return [
        path
        for key, value in values.items()
        for path in (
            leaves(value, f"{prefix}.{key}")
            if isinstance(value, dict) and value and key not in ("options", "resources")
            else [f"{prefix}.{key}"]
        )
    ]


def test_each_value_is_used_and_each_that_is_used_is_there():
    used = {
        word
        for path in (FOLDER / "templates").iterdir()
        for word in re.findall(r"\.Values(?:\.\w+)+", path.read_text())
    }
    assert used == set(leaves(yaml.safe_load((FOLDER / "values.yaml").read_text())))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{{ if .a }}", "has no end"), ("{{ lookup .a }}", "unknown function"), ("{{ a }}", "word")],
)
def test_a_template_that_is_not_understood_is_an_error(tmp_path, text, message):
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("name: x")
    (tmp_path / "values.yaml").write_text("{}")
    (tmp_path / "templates" / "x.yaml").write_text(text.replace(".a", ".Chart.Name"))
    with pytest.raises(ValueError, match=message):
        Chart(tmp_path).render()
    assert _parse("a {{- 1 -}} b")[0] == ("text", "a")


def test_the_chart_has_the_version_of_the_sources():
    from toolkit_lm import __version__

    data = yaml.safe_load((FOLDER / "Chart.yaml").read_text())
    assert (data["version"], data["appVersion"]) == (__version__, __version__)
