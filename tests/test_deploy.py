"""The files in deploy/: linters and schemas of those who read them, and options and routes that
exist."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
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
ENTRYPOINT = DEPLOY / "entrypoint.sh"
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
    "path",
    [DEPLOY / "Dockerfile", ENTRYPOINT, COMPOSE, *MANIFESTS, *UNITS],
    ids=lambda path: path.name,
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
    assert "/health" in ENTRYPOINT.read_text()
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


def stages() -> dict[str, tuple[str, str]]:
    """Name of a stage of the Dockerfile -> the one it is made from, and its text."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    parts = re.split(r"(?m)^FROM (\S+) AS (\S+)$", text)[1:]
    return {
        name: (source, body)
        for source, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }


@pytest.mark.parametrize(("target", "compilers"), [("cpu", set()), ("cuda", {"gcc"})])
def test_an_image_has_no_compilers_but_what_triton_needs(target, compilers):
    found = stages()
    text = ""
    name = target
    while name in found:
        name, body = found[name]
        text += body
    assert (
        set(re.findall(r"(?<![\w-])(gcc|g\+\+|clang|build-essential|cmake|git)\b", text))
        == compilers
    )
    assert "pip install" not in text and f"COPY --from=for-{target}" in text
    assert "HEALTHCHECK" in text and re.search(r"(?m)^USER 10001$", text)
    assert "TOOLKIT_LM_HOST" not in text
    assert not re.search(r"(?i)(?:ENV|ARG) .*(?:key|token|password)", text)


def test_torch_comes_from_one_index_that_an_argument_names():
    found = stages()
    assert [name for name, (_, body) in found.items() if "ARG TORCH_INDEX" in body] == ["installer"]
    for target in ("for-cpu", "for-cuda"):
        source, body = found[target]
        assert source == "installer" and "-c /torch.txt" in body


def test_a_base_image_and_an_index_of_pip_can_be_named_for_all_stages():
    """Not every builder gives a stage the arguments of the one that it is made from."""
    found = stages()
    assert {source for source, _ in found.values()} == {"${BASE}", "installer", "base"}
    installs = {name for name, (_, body) in found.items() if "pip install" in body}
    assert installs == {name for name, (_, body) in found.items() if "ARG PIP_INDEX_URL" in body}
    assert installs == {"wheels", "installer", "for-cpu", "for-cuda"}


@pytest.mark.parametrize(
    ("lacks", "machine", "allowed", "code"),
    [
        ("", "x86_64", "", 0),
        ("cpu", "x86_64", "", 1),
        ("executor_mp", "x86_64", "", 1),
        ("cpu", "x86_64", "1", 0),
        ("cpu", "aarch64", "", 0),
    ],
)
def test_an_image_without_kernels_is_built_only_where_it_is_asked_for(
    tmp_path, lacks, machine, allowed, code
):
    [(argument, step)] = re.findall(
        r"(?m)^ARG (\w+)\nRUN (if .*; fi)$", re.sub(r" {2,}", " ", stages()["wheels"][1])
    )
    assert {path.parent.name for path in DEPLOY.parent.glob("*/*/compile.py")} == {
        "cpu",
        "executor_mp",
    }
    for name in ("cpu", "executor_mp"):
        kind = "py3-none-any" if name == lacks else "cp311-abi3-linux_x86_64"
        (tmp_path / f"toolkit_lm_{name}-1.0-{kind}.whl").touch()
    script = f"uname() {{ echo {machine}; }}\n{step.replace('/wheels', str(tmp_path))}"
    found = subprocess.run(
        ["sh", "-euc", script],
        env={"PATH": os.environ["PATH"], argument: allowed},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout) == (code, "")
    assert (f"error: the C sources of toolkit-lm-{lacks}" in found.stderr) == bool(code)
    assert ("--build-arg WITHOUT_KERNELS=1" in found.stderr) == bool(code)


def test_the_context_has_what_the_stages_copy():
    """The ignore file leaves out all but what it names."""
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    named = {line[1:] for line in ignored if line.startswith("!")}
    needed = {"constraints.txt", "deploy/distributions.py", "deploy/entrypoint.sh", "README.md"}
    folders = {"core", "libs", "plugins", "contrib_models", "contrib_backends"}
    assert needed | folders | {"pyproject.toml", "LICENSE"} <= named
    assert [name for name in sorted(named) if not (DEPLOY.parent / name).exists()] == []


@pytest.fixture
def image(tmp_path):
    """image(*command, **environ): the entrypoint with a `toolkit` that shows what it was given."""
    shown = tmp_path / "toolkit"
    shown.write_text('#!/bin/sh\necho "$@" on "${TOOLKIT_LM_HOST:-its default}"\n')
    shown.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        words = ["sh", str(ENTRYPOINT), *command]
        return subprocess.run(
            words, env={"PATH": path, **environ}, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.mark.parametrize(
    ("command", "environ", "host"),
    [
        (["serve", "tiny"], {"TOOLKIT_LM_API_KEY": "secret"}, "0.0.0.0"),
        (["serve"], {"TOOLKIT_LM_API_KEYS_FILE": "/keys.yaml"}, "0.0.0.0"),
        (["render", "tiny", "--api-keys-file=k"], {}, "0.0.0.0"),
        (["serve", "--api-key", "a b"], {"TOOLKIT_LM_HOST": "::"}, "::"),
        (["serve"], {"TOOLKIT_LM_HOST": "0.0.0.0"}, "0.0.0.0"),
        (["worker", "--node-rank", "1"], {}, "its default"),
        (["plugins", "list"], {}, "its default"),
    ],
)
def test_an_image_serves_others_with_a_key(image, command, environ, host):
    found = image(*command, **environ)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == f"{' '.join(command)} on {host}\n"


@pytest.mark.parametrize("command", ["serve", "render"])
@pytest.mark.parametrize("environ", [{}, {"TOOLKIT_LM_API_KEY": ""}])
def test_an_image_without_a_key_does_not_serve(image, command, environ):
    found = image(command, "--api-key-like", **environ)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: without a key") and "TOOLKIT_LM_API_KEY," in found.stderr


def test_the_health_check_of_an_image(image):
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        port = str(server.server_address[1])
        try:
            assert image("healthcheck", TOOLKIT_LM_PORT=port).returncode == 0
            status[0] = 503
            found = image("healthcheck", TOOLKIT_LM_PORT=port)
            assert found.returncode == 1 and "503" in found.stderr
        finally:
            server.shutdown()
    found = image("healthcheck", TOOLKIT_LM_PORT=port)
    assert found.returncode == 1 and f"http://127.0.0.1:{port}/health" in found.stderr


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_steps_of_an_image_run_in_its_context(tmp_path):
    """What a stage runs, in a folder that has what the context has, and an environment of its own.
    Packages of others are those of this environment: `pip check` of what is installed is in
    test_installed.py."""
    context = tmp_path / "src"
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    named = tuple(line[1:] for line in lines if line.startswith("!"))
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=DEPLOY.parent, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        inside = name in named or name.split("/")[0] in named
        if inside and "tests" not in name.split("/"):
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(DEPLOY.parent / name, context / name)
    wheels = tmp_path / "wheels"
    [step] = re.findall(r"python deploy/distributions\.py --to /wheels", stages()["wheels"][1])
    words = step.replace("/wheels", str(wheels)).split()[1:]
    done = subprocess.run([sys.executable, *words], cwd=context, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for target in ("for-cpu", "for-cuda"):
        [asked] = re.findall(r'"(toolkit-lm\[.*?)"', stages()[target][1])
        pip = [sys.executable, "-m", "pip", "install", "--target", tmp_path / target, "--no-deps"]
        offline = ["--quiet", "--no-index", "--find-links", wheels]
        found = tool(*pip, *offline, asked)
        assert found.returncode == 0, found.stderr
        extras = asked.partition("[")[2].partition("]")[0].split(",")
        distribution = "toolkit_lm_{}-*.whl"
        for extra in set(extras) - {"cuda"}:
            assert list(wheels.glob(distribution.format(extra))), extra


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("debootstrap", "buildah"))),
    reason="a base image takes root, debootstrap and buildah",
)
def test_the_cpu_image_builds_and_serves():
    """Without a registry of images: Debian's and Python's packages come from their mirrors."""
    words = [sys.executable, DEPLOY / "build_image.py"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    built = re.findall(r"(?m)^stage (\S+): \d+ s, [\d.]+ [MG]B$", done.stdout)
    assert built == ["wheels", "installer", "for-cpu", "base", "cpu"]
    told = ("user 10001, no compilers", "without a key: refused", "with a key: healthy, ")
    assert [line for line in told if line not in done.stdout] == []


def test_a_fresh_machine_runs_what_readme_says(monkeypatch):
    monkeypatch.syspath_prepend(str(DEPLOY))
    import fresh_machine

    assert fresh_machine.commands() == ["make demo", "make test"]
    log = "2026-01-31T12:00:00,123   Downloading torch-2.0-cp311-linux_x86_64.whl (190.5 MB)\n"
    assert fresh_machine.DOWNLOADED.search(log).groups() == (
        "torch-2.0-cp311-linux_x86_64.whl",
        "190.5",
        "MB",
    )
    makefile = (DEPLOY.parent / "Makefile").read_text()
    said = [line for line in re.findall(r'@echo "([^"]*)"', makefile) if line[0].isdigit()]
    assert len(said) == 4 and all(map(fresh_machine.STAGE.fullmatch, said))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("debootstrap", "buildah"))),
    reason="a fresh machine takes root, debootstrap and buildah",
)
def test_the_demo_runs_on_a_fresh_machine():
    words = [sys.executable, DEPLOY / "fresh_machine.py", "make demo"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    demo = done.stdout.partition("$ make demo")[2]
    sizes = [int(size) for size in re.findall(r"(?m)^ *[\d.]+ s +(\d+) MB  ", demo)]
    # Five stages and both ends: what README says it takes, with the wheels and their folder.
    assert len(sizes) == 7 and 700 < sizes[-1] - sizes[0] < 1300
