"""The files in deploy/: linters and schemas of those who read them, and options and routes that
exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from toolkit_lm.config import VllmConfig, options_of
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import CommandRegistry
from toolkit_lm_executor_mp.network import KEY_VARIABLE
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.request_log import POLLS

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
COMPOSE = DEPLOY / "compose.yaml"
OPTIONS = [*VllmConfig.options(), *options_of(ServerOptions)]


def tool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)


def documents() -> list[dict]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def pods() -> dict[str, dict]:
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in documents()
        if "template" in one.get("spec", {})
    }


def test_the_dockerfile_passes_its_linter():
    found = tool(
        Path(sys.executable).with_name("hadolint"),
        "--failure-threshold",
        "style",
        DEPLOY / "Dockerfile",
    )
    assert (found.returncode, found.stdout) == (0, "")


def test_the_yaml_passes_its_linter():
    found = tool(
        sys.executable, "-m", "yamllint", "--strict", "-c", DEPLOY / ".yamllint.yaml", DEPLOY
    )
    assert (found.returncode, found.stdout) == (0, "")


def test_the_compose_file_fits_its_schema():
    found = tool(
        sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("version", ["1.31", "latest"])
def test_the_manifests_fit_the_schemas_of_kubernetes(version):
    """1.31 is the first whose StatefulSets may begin at ordinal 1 without a gate."""
    version = kubernetes_validate.latest_version() if version == "latest" else version
    assert len(documents()) == 7
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_units(unit, tmp_path):
    # Nothing is installed where the unit looks.
    text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={shutil.which('true')}", unit.read_text())
    (tmp_path / unit.name).write_text(text)
    found = tool(
        "systemd-analyze", "verify", "--man=no", "--recursive-errors=no", tmp_path / unit.name
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    "path", [DEPLOY / "Dockerfile", COMPOSE, *MANIFESTS, *UNITS], ids=lambda path: path.name
)
def test_variables_and_flags_are_options(path):
    text = path.read_text()
    assert set(re.findall(r"TOOLKIT_LM_[A-Z_]+", text)) <= {option.env for option in OPTIONS} | {
        KEY_VARIABLE
    }
    words = re.findall(r"(?:command: |args: |ExecStart=\S+ ).*", text)
    flags = {flag for line in words for flag in re.findall(r"(?<![\w-])--[a-z-]+", line)}
    assert flags <= {option.flag for option in OPTIONS} | {"--config"}


def test_commands_exist():
    commands = {pod["containers"][0]["args"][0] for pod in pods().values()}
    commands |= {
        service["command"][0]
        for service in yaml.safe_load(COMPOSE.read_text())["services"].values()
    }
    commands |= {re.search(r"(?m)^ExecStart=\S+ (\S+)", unit.read_text())[1] for unit in UNITS}
    assert commands == {"serve", "worker"}
    assert commands <= set(Plugins.load().brought_registry(CommandRegistry))


def test_probes_are_routes_for_polls():
    probed = [
        (kind, container[f"{kind}Probe"]["httpGet"])
        for pod in pods().values()
        for container in pod["containers"]
        for kind in ("liveness", "readiness")
        if container["args"][0] == "serve"
    ]
    assert {(kind, probe["path"]) for kind, probe in probed} == {
        ("liveness", "/live"),
        ("readiness", "/ready"),
    }
    assert "/health" in COMPOSE.read_text()
    assert {"/live", "/ready", "/health"} <= set(POLLS)


def test_who_ends_the_server_waits_longer_than_it():
    for pod in pods().values():
        values = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        if "TOOLKIT_LM_SHUTDOWN_TIMEOUT" in values:
            assert pod["terminationGracePeriodSeconds"] > int(values["TOOLKIT_LM_SHUTDOWN_TIMEOUT"])


def test_there_are_as_many_nodes_as_the_server_says():
    sets = {
        one["metadata"]["name"]: one["spec"] for one in documents() if one["kind"] == "StatefulSet"
    }
    server = sets["toolkit-lm-server"]
    worker = sets["toolkit-lm-worker"]
    (container,) = server["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert server["replicas"] + worker["replicas"] == int(values["TOOLKIT_LM_NODES"])
    assert worker["ordinals"]["start"] == server["replicas"] == 1
    ranks = int(values["TOOLKIT_LM_TENSOR_PARALLEL_SIZE"]) * int(
        values["TOOLKIT_LM_PIPELINE_PARALLEL_SIZE"]
    )
    assert (
        int(container["resources"]["limits"]["nvidia.com/gpu"]) * int(values["TOOLKIT_LM_NODES"])
        == ranks
    )
