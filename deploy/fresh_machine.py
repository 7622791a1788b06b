"""Commands of README on a fresh Debian, run by an ordinary user: their times and bytes.

usage: python deploy/fresh_machine.py ["make demo" ...]

debootstrap makes the machine, of the Debian that this one runs. It has what README asks for, and
git for the clone. buildah runs it in a temporary folder, which is removed. Both programs must be
here, and the user be root. Processors, network and pip's configuration are those of this machine.
A wheel in a folder that this configuration names is not downloaded. The clone has what is
committed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

from build_image import ROOT, make_base, output, pip_volumes

PACKAGES = "ca-certificates,git,make,python3,python3-venv"
HOME = "/home/stranger"
PIP_LOG = f"{HOME}/pip.log"
STAGE = re.compile(r"\d/\d .*|Installing .*|Serving .*|=* ?\d+ (?:passed|failed).* in [\d.:]+.*")
"""Lines of output that begin or end a stage."""
NOISE = re.compile(r"WARNING: Location .* is ignored.*|\s*━.*|\s*")
"""Lines of pip that say nothing of a fresh machine."""
DOWNLOADED = re.compile(r" Downloading (\S+) \(([\d.]+) (kB|MB|bytes)\)")
SCALE = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0}


def commands() -> list[str]:
    """The commands that README has under its heading "Two commands"."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition("## Two commands")[2].split("```")[1]
    return re.findall(r"(?m)^(make \w+)", block)


class Machine:
    """A container whose user has no rights, and a home with a clone of this repository."""

    def __init__(self, folder: Path, buildah: list[str]) -> None:
        self._name = output(*buildah, "from", "--pull-never", "localhost/base")
        self._root = Path(output(*buildah, "mount", self._name))
        run = [*buildah, "run", "--isolation=chroot"]
        output(*run, self._name, "--", "useradd", "--create-home", "stranger")
        output("git", "-C", ROOT, "bundle", "create", folder / "repository", "HEAD")
        self._run = [*run, "--user=stranger", f"--workingdir={HOME}", f"--env=PIP_LOG={PIP_LOG}"]
        self._run.append(f"--env=HOME={HOME}")
        self._run += [*pip_volumes(folder), f"--volume={folder}/repository:/repository:ro"]

    def disk(self) -> float:
        """Megabytes that its files take."""
        return int(output("du", "--summarize", "--block-size=1", self._root).split()[0]) / 1e6

    def log(self) -> list[str]:
        """Lines of pip's log, which has what `--quiet` leaves out."""
        log = self._root / PIP_LOG[1:]
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def downloads(self) -> dict[str, float]:
        """Names of the files that pip has downloaded -> megabytes, as its log rounds them."""
        found = filter(None, map(DOWNLOADED.search, self.log()))
        return {line[1]: float(line[2]) * SCALE[line[3]] for line in found}

    def run(self, command: str) -> int:
        """Prints a line for each stage, and a command's last ones. Returns its exit code."""
        before = self.downloads()
        load = os.getloadavg()[0]
        print(f"\n$ {command}\n{0:7.1f} s {self.disk():7.0f} MB  load {load:.1f}", flush=True)
        start = time.monotonic()
        shell = ["sh", "-c", f"cd toolkit-lm 2> /dev/null; {command}"]
        words = [*self._run, self._name, "--", *shell]
        lines = []
        with subprocess.Popen(words, text=True, stdout=PIPE, stderr=STDOUT) as process:
            for line in process.stdout or ():
                if STAGE.fullmatch(line.strip()):
                    seconds = time.monotonic() - start
                    print(f"{seconds:7.1f} s {self.disk():7.0f} MB  {line.strip()}", flush=True)
                elif not NOISE.fullmatch(line.rstrip()):
                    lines.append(line)
        code = process.returncode
        end = f"{time.monotonic() - start:7.1f} s {self.disk():7.0f} MB"
        new = {name: size for name, size in self.downloads().items() if name not in before}
        torch = sum(size for name, size in new.items() if name.startswith("torch-"))
        pip = f"pip downloaded {len(new)} files, {sum(new.values()):.0f} MB, {torch:.0f} of torch"
        print(f"{end}  exit code {code}; {pip}; load {os.getloadavg()[0]:.1f}", flush=True)
        told = [f"{line}\n" for line in self.log()[-40:]] if code else []
        print("".join(lines[-60:] + told), flush=True)
        return code


def main() -> None:
    if os.geteuid() or not all(map(shutil.which, ("debootstrap", "buildah"))):
        sys.exit("error: this needs debootstrap, buildah, and root")
    with tempfile.TemporaryDirectory(prefix="machine-") as folder:
        buildah = ["buildah", "--root", f"{folder}/storage", "--runroot", f"{folder}/run"]
        try:
            make_base(buildah, PACKAGES)
            machine = Machine(Path(folder), buildah)
            print(f"Debian with {PACKAGES}; {os.cpu_count()} processors")
            clone = "git clone --quiet --config advice.detachedHead=false /repository toolkit-lm"
            codes = [machine.run(command) for command in [clone, *(sys.argv[1:] or commands())]]
        finally:
            output(*buildah, "rm", "--all")
            output(*buildah, "rmi", "--all", "--force")
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
