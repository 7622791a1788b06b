"""Builds the CPU image of deploy/Dockerfile where no registry of images is reached, and checks it.

usage: python deploy/build_image.py

The base image is made by debootstrap, of the Debian that this machine runs. buildah builds the
image in a temporary folder, which is removed. Both programs must be here, and the user be root.
The build reads this machine's configuration of pip, which no image keeps, and TORCH_INDEX.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BASE = "localhost/base"
IMAGE = "localhost/toolkit-lm:cpu"
PACKAGES = "ca-certificates,libpython3-dev,python-is-python3,python3-venv"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMPILERS = "cc gcc g++ c++ clang tcc nvcc rustc go as ld make cmake"
ASK = """
import json, os, urllib.error, urllib.request
def ask(key):
    body = b'{"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0}'
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    url = "http://127.0.0.1:" + os.environ["TOOLKIT_LM_PORT"] + "/v1/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
print("answer:", ask("secret")["choices"])
try:
    raise AssertionError(ask("another"))
except urllib.error.HTTPError as error:
    assert error.code == 401, error
"""
SERVE = """timeout 300 "$@" 2>&1 &
until HEALTHY; do kill -0 $!; sleep 1; done
python -c "$ASK" && code=0 || code=1
kill $!; wait $! || test $? = 143
exit $code"""


def output(*words: str | Path, code: int = 0) -> str:
    """Output of a command, errors included unless `code` is 0. Another code ends the program."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{shlex.join(map(str, words))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return (done.stdout + (done.stderr if code else "")).strip()


def make_base(buildah: list[str], packages: str = PACKAGES) -> None:
    """Makes an image of Debian with Python, or with what `packages` names."""
    name = output(*buildah, "from", "scratch")
    root = output(*buildah, "mount", name)
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    indexes = ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {suite}"]
    mirror = output(*indexes).splitlines()[0]
    output("debootstrap", "--variant=minbase", f"--include={packages}", suite, root, mirror)
    output("chroot", root, "sh", "-c", "apt-get clean && rm -rf /var/lib/apt/lists/*")
    output(*buildah, "config", "--env", f"PATH={PATH}", name)
    output(*buildah, "commit", "--quiet", "--rm", name, BASE)


def pip_volumes(folder: Path) -> list[str]:
    """Mounts of pip's configuration here, and of the files and folders that it names."""
    listed = output(sys.executable, "-m", "pip", "config", "list")
    lines = ["[global]"]
    paths: set[Path] = set()
    values = dict(re.findall(r"(?m)^(?:\w+|:env:)\.([\w-]+)=(.*)$", listed)[::-1])
    for name, value in values.items():
        words = ast.literal_eval(value).split()
        lines.append(f"{name} = " + "\n  ".join(words))
        # An index names files beside it.
        paths |= {Path(word[7:]).parent for word in words if word.startswith("file:///")}
        paths |= {Path(word) for word in words if word.startswith("/")}
    (folder / "pip.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    mounted = [f"--volume={path}:{path}:ro" for path in sorted(paths) if path.exists()]
    return [*mounted, f"--volume={folder}/pip.conf:/etc/pip.conf:ro"]


def build(buildah: list[str], volumes: list[str]) -> None:
    """Builds the image. Prints the seconds and the size of each stage."""
    command = [*buildah, "build", "--isolation=chroot", "--format=docker", "--layers", *volumes]
    command += ["--pull=never", "--target=cpu", f"--tag={IMAGE}", f"--build-arg=BASE={BASE}"]
    command.append(f"--build-arg=TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}")
    command += [f"--ignorefile={DOCKERFILE}.dockerignore", f"--file={DOCKERFILE}", f"{ROOT}"]
    lines = []
    stages = []
    made = {}
    with subprocess.Popen(command, text=True, stdout=PIPE, stderr=STDOUT) as process:
        for line in process.stdout:
            lines.append(line)
            if stage := re.match(r"\[.*STEP 1/.* AS (\S+)", line):
                stages.append((stage[1], time.monotonic()))
            elif layer := re.match(r"--> ([0-9a-f]+)", line):
                made[stages[-1]] = layer[1]
    if process.returncode:
        sys.exit("".join(lines[-60:]))
    listed = output(*buildah, "images", "--all", "--format", "{{.ID}} {{.Size}}")
    ends = [start for _, start in stages[1:]] + [time.monotonic()]
    for (name, start), end in zip(stages, ends, strict=True):
        [size] = set(re.findall(rf"(?m)^{made[name, start][:11]}\w* (.*)", listed))
        print(f"stage {name}: {end - start:.0f} s, {size.strip()}", flush=True)


def check(buildah: list[str]) -> None:
    """Runs the image. The first fault ends the program."""
    found = json.loads(output(*buildah, "inspect", "--type=image", IMAGE))["Docker"]["config"]
    container = output(*buildah, "from", "--pull-never", IMAGE)
    run = [*buildah, "run", "--isolation=chroot"]
    serve = [container, "--", *found["Entrypoint"], *found["Cmd"]]
    script = f'id -u; for name in {COMPILERS}; do command -v "$name" || true; done'
    user = output(*run, container, "--", "sh", "-c", script)
    assert user == "10001", f"another user, or compilers: {user}"
    print("user 10001, no compilers")
    told = output(*run, *serve, code=2)
    assert "error: without a key" in told, told
    print("without a key: refused")
    with socket.create_server(("", 0)) as probe:
        values = {"PORT": probe.getsockname()[1], "API_KEY": "secret"}
    run += [f"--env=TOOLKIT_LM_{name}={value}" for name, value in values.items()]
    script = SERVE.replace("HEALTHY", shlex.join(found["Healthcheck"]["Test"][1:]))
    start = time.monotonic()
    told = output(*run, f"--env=ASK={ASK}", container, "--", "sh", "-euc", script, "sh", *serve[2:])
    assert "its kernels are not there" not in told, told
    [answer] = re.findall(r"(?m)^answer: (.*'text': '.+'.*)", told)
    print(f"with a key: healthy, asked and stopped in {time.monotonic() - start:.0f} s: {answer}")


def main() -> None:
    if os.geteuid() or not all(map(shutil.which, ("debootstrap", "buildah"))):
        sys.exit("error: this needs debootstrap, buildah, and root")
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        buildah = ["buildah", "--root", f"{folder}/storage", "--runroot", f"{folder}/run"]
        try:
            start = time.monotonic()
            make_base(buildah)
            size = output(*buildah, "images", "--format", "{{.Size}}")
            print(f"base: {time.monotonic() - start:.0f} s, {size}", flush=True)
            build(buildah, pip_volumes(Path(folder)))
            check(buildah)
        finally:
            output(*buildah, "rm", "--all")
            output(*buildah, "rmi", "--all", "--force")


if __name__ == "__main__":
    main()
