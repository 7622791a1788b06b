"""Runs, checks and measures everything on one card, offline, in eight minutes.

usage: bash benchmarks/gpu_kit.sh [--seconds 480] [--quick] [--out FOLDER] [--kit FOLDER] [--only
A,C]

Its parts, in this order: 0 the machine, A `tiny` against the CPU, B conformance kits, C CUDA
graphs, D the server, E1 speed, E2 speed with graphs, F other kernels, G other shapes. Each runs in
processes of its own, until its time is over; the times are shares of --seconds. What is found is
printed and written to a file at once, a line for each check.
--quick runs all of it on a CPU, on small shapes: it measures nothing.
--kit: what `make gpu-kit` has made.

Exit codes: 0: all that can run here did, and passed. 1: a check failed, or time was over before all
were done. 2: nothing can run, and why. 3: there is no card.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from gpu_kit.drive import NO_CARD, USAGE, Driver, Stage
from gpu_kit.jobs import COMMIT, ROOT, Job
from gpu_kit.limits import CHECKS, RATE
from gpu_kit.machine import CARD, REFUSALS
from gpu_kit.needs import MUST, Found, find_here, lacking
from gpu_kit.plan import SECONDS, Kit
from gpu_kit.results import FOLDER, Results, read

QUICK_SECONDS = 3600.0
"""A dry run is to end, and on whatever machine."""
NEEDS = Stage("0", "the machine", 1.0, list)


def commit() -> str:
    """The commit of the sources, as `make gpu-kit` has written it or git says; else "unknown"."""
    if (written := ROOT / COMMIT).exists():
        return written.read_text(encoding="utf-8").strip()
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def check_needs(driver: Driver) -> bool:
    """Says what is missing, and which distribution needs it. Returns whether anything can run."""
    site = os.environ.get("GPU_KIT_SITE")

    def find(name: str) -> Found | None:
        return find_here(name, Path(site) if site else None)

    for lack in lacking(find):
        driver.add(
            NEEDS,
            Job("needs", ()),
            {"check": lack.requirement.name, "outcome": "failed", "why": str(lack)},
        )
    return not lacking(find, MUST)


def run(kit: Kit, driver: Driver, results: Results, only: list[str] | None) -> int:
    """Runs the parts. Returns the exit code."""
    first, *others = kit.parts()
    driver.run(first)
    told = {line["check"]: line for line in read(results.path) if line.get("job") == "machine"}
    if told.get(CARD, {}).get("outcome") == "failed" and "traceback" not in told[CARD]:
        return NO_CARD
    kit.refusals = told.get(REFUSALS, {})
    kit.limits = {
        name: str(told[check][RATE])
        for check, name in CHECKS.items()
        if RATE in told.get(check, {})
    }
    for part in others:
        if only is None or part.name in only:
            driver.run(part)
    return driver.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="gpu_kit.sh"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of all parts; default: {SECONDS:.0f}, with --quick {QUICK_SECONDS:.0f}",
    )
    parser.add_argument("--quick", action="store_true", help="a dry run on a CPU")
    parser.add_argument(
        "--out",
        type=Path,
        default=FOLDER,
        help="folder of the results; default: benchmarks/results",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        help="names of parts, separated by commas; part 0 runs always",
    )
    args = parser.parse_args()
    begun = time.monotonic()
    kit = Kit(quick=args.quick)
    names = [part.name for part in kit.parts()]
    if unknown := set(args.only or ()).difference(names):
        parser.error(
            f"there is no part {', '.join(sorted(unknown))}: the parts are {', '.join(names)}"
        )
    seconds = args.seconds
    if seconds is None:
        seconds = QUICK_SECONDS if args.quick else SECONDS
    if not seconds > 0:
        parser.error(f"--seconds must be more than 0, not {seconds:g}")
    results = Results(args.out.resolve(), "quick" if args.quick else "gpu")
    print(f"results: {results.path}", flush=True)
    results.add(
        {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit(),
            "seconds": seconds,
            "quick": args.quick,
        }
    )
    driver = Driver(results, seconds, begun)
    code = run(kit, driver, results, args.only) if check_needs(driver) else USAGE
    took = round(time.monotonic() - begun, 1)
    results.add({"exit": code, "took": took, **driver.counts})
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(driver.counts.items()))
    print(f"{told} in {took:.0f} s; exit code {code}", flush=True)
    if code in (NO_CARD, USAGE) and not any(
        True for line in read(results.path) if line.get("outcome") == "passed"
    ):
        # Nothing has run: no results.
        results.path.unlink()
    return code


if __name__ == "__main__":
    sys.exit(main())
