"""The GPU kit without a GPU: what it says, whatever happens to it. `make test-nightly` has a dry
run of all that it runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from processes import is_alive

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
KIT = BENCHMARKS / "gpu_kit.sh"
SPEAKER = """
import sys, time
from gpu_kit.report import checking, die_with_the_kit, emit
die_with_the_kit()
"""
"""How a process of the kit begins."""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The kit's modules, here and in processes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))


def kit(name):
    return importlib.import_module(f"gpu_kit.{name}")


def job(name, script):
    return kit("jobs").Job(name, ("-c", SPEAKER + script))


def drive(folder, *jobs, seconds=60.0, results=None):
    """The driver after a part of these jobs, and the lines of its results."""
    drive, results = kit("drive"), results or kit("results").Results(folder, "gpu")
    driver = drive.Driver(results, seconds, time.monotonic())
    driver.run(drive.Stage("T", "a test's", 1.0, lambda: list(jobs)))
    return driver, list(kit("results").read(results.path))


def run_kit(*arguments, python=sys.executable, **environ):
    given = {**os.environ, "PYTHON": python, **environ}
    return subprocess.run(
        ["bash", str(KIT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env=given,
    )


def test_no_card_is_said_and_is_exit_code_3(tmp_path):
    done = run_kit("--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.search(
        r"0 machine \| card: failed: torch \S+ \(built with .*\) sees no card, .*--quick runs on "
        r"a CPU\.",
        done.stdout,
    )
    assert list(tmp_path.iterdir()) == [], "a file of results in which nothing has run"


def test_a_part_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    done = run_kit("--only", "A,Z", "--out", tmp_path)
    assert done.returncode == 2
    assert "there is no part Z: the parts are 0, A, B, C, D, E1, E2, F, G" in done.stderr


def test_a_failing_check_is_recorded_with_its_traceback_and_the_rest_goes_on(tmp_path):
    driver, lines = drive(
        tmp_path,
        job(
            "bad",
            "with checking('first'):\n    1 / 0\nwith checking('second') as found:\n    "
            "found['answer'] = 42\n",
        ),
        job("dies", "emit('one', 'passed')\nprint('last words', file=sys.stderr)\nsys.exit(7)\n"),
        job("says nothing", ""),
        job("good", "emit('only', 'passed')\n"),
    )
    assert [(line["job"], line["check"], line["outcome"]) for line in lines] == [
        ("bad", "first", "failed"),
        ("bad", "second", "passed"),
        ("dies", "one", "passed"),
        ("dies", "process", "failed"),
        ("says nothing", "process", "failed"),
        ("good", "only", "passed"),
    ]
    assert lines[0]["why"] == "ZeroDivisionError: division by zero"
    assert lines[0]["traceback"].startswith("Traceback (most recent call last)")
    assert lines[1]["answer"] == 42
    assert lines[3]["why"] == "the process ended with 7" and "last words" in lines[3]["traceback"]
    assert lines[4]["why"] == "the process has found nothing"
    assert driver.exit_code == 1


def test_what_cannot_run_here_is_no_fault_and_no_process(tmp_path):
    refused = kit("jobs").Job("refused", ("-c", "raise SystemExit(1)"), refusal="no kernel for it")
    said = job(
        "raises",
        "from gpu_kit.report import RefusedError\nwith checking('it'):\n    raise "
        "RefusedError('not here')\n",
    )
    driver, lines = drive(tmp_path, refused, said)
    assert [(line["outcome"], line["why"]) for line in lines] == [
        ("skipped", "no kernel for it"),
        ("skipped", "not here"),
    ]
    assert driver.exit_code == 0


def test_time_that_is_over_leaves_what_was_found_and_says_what_has_not_run(tmp_path):
    slow = job(
        "slow",
        "import subprocess\nemit('first', 'passed', child=subprocess.Popen(['sleep', "
        "'99']).pid)\ntime.sleep(99)\n",
    )
    driver, lines = drive(tmp_path, slow, job("next", "emit('only', 'passed')\n"), seconds=4.5)
    assert [(line["job"], line["check"], line["outcome"]) for line in lines][:2] == [
        ("slow", "first", "passed"),
        ("slow", "process", "cut"),
    ]
    assert driver.exit_code == 1
    assert re.match(r"its time was over, at <string>:\d+ <module>$", lines[1]["why"])
    assert "most recent call first" in lines[1]["traceback"]
    assert not is_alive(lines[0]["child"]), "what a process has started ends with it"
    driver, lines = drive(tmp_path, job("late", ""), seconds=1.0)
    assert lines[-1]["outcome"] == "unrun" and driver.exit_code == 1


def test_a_job_may_take_an_equal_share_of_what_is_left_to_those_that_run(tmp_path, monkeypatch):
    jobs = kit("jobs")
    limits = []
    monkeypatch.setattr(
        jobs,
        "run",
        lambda job, limit: limits.append(round(limit)) or [{"check": "it", "outcome": "passed"}],
    )
    drive(
        tmp_path,
        *(jobs.Job(name, (), refusal="no" if name == "c" else None) for name in "abcd"),
        seconds=60.0,
    )
    assert limits == [20, 30, 60], "each took no time, and the third has none"


FLOOD = SPEAKER + (
    "number = 0\nwhile True:\n    number += 1\n    emit(f'check {number}', 'passed', "
    "text='x' * (number % 3000))\n"
)
FLOODED = """
import os, sys, time
from pathlib import Path
from gpu_kit.drive import Driver, Stage
from gpu_kit.jobs import Job
from gpu_kit.results import Results
results = Results(Path(sys.argv[1]), "gpu")
driver = Driver(results, 60.0, time.monotonic())
driver.run(Stage("T", "", 1.0, lambda: [Job("flood", ("-c", sys.argv[2]))]))
"""


def test_a_kit_that_is_killed_at_any_moment_leaves_whole_lines_and_no_process(tmp_path):
    random.seed(7)
    for turn in range(4):
        folder = tmp_path / str(turn)
        process = subprocess.Popen(
            [sys.executable, "-c", FLOODED, str(folder), FLOOD], stdout=subprocess.DEVNULL
        )
        while not (files := list(folder.glob("gpu-*.json"))) or not files[0].stat().st_size:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.3))
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # `read` ignores a line that was not written to its end; it is the last.
        lines = list(kit("results").read(files[0]))
        assert [line["check"] for line in lines] == [
            f"check {number + 1}" for number in range(len(lines))
        ]
        assert lines
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


def test_a_last_line_that_is_cut_is_left_out(tmp_path):
    file = tmp_path / "gpu-1.json"
    file.write_text('{"check": "one"}\n{"check": "tw')
    assert list(kit("results").read(file)) == [{"check": "one"}]


OURS = {
    "toolkit-lm": ("0.1", ('toolkit-lm-core>=0.1; extra == "cuda"', "toolkit-lm-server")),
    "toolkit-lm-core": ("0.1", ("msgspec>=0.19", 'colorama; sys_platform == "win32"')),
    "toolkit-lm-server": ("0.1", ("fastapi>=0.115",)),
    "fastapi": ("0.165", ("starlette>=1.0",)),
}


def lacking(**there):
    needs = kit("needs")
    known = {**OURS, **{name: (version, ()) for name, version in there.items()}}
    return needs.lacking(
        lambda name: needs.Found(*known[name]) if name in known else None, ["toolkit-lm[cuda]"]
    )


def test_a_missing_wheel_is_named_with_what_needs_it():
    assert [str(lack) for lack in lacking()] == [
        "msgspec>=0.19 is missing, which toolkit-lm-core needs",
        "starlette>=1.0 is missing, which fastapi needs",
    ]
    assert [str(lack) for lack in lacking(msgspec="0.18", starlette="1.2")] == [
        "msgspec>=0.19 is missing, which toolkit-lm-core needs, and 0.18 is there",
    ]


def test_a_kit_that_lacks_a_wheel_says_so_and_runs_nothing_where_nothing_can(tmp_path, capsys):
    module = kit("__main__")
    results = kit("results").Results(tmp_path, "gpu")
    driver = kit("drive").Driver(results, 60.0, time.monotonic())
    found = kit("needs").find_here
    for name, runs in (("fastapi", True), ("msgspec", False)):
        module.find_here = lambda asked, site, name=name: (
            None if asked == name else found(asked, site)
        )
        try:
            assert module.check_needs(driver) is runs
        finally:
            module.find_here = found
        assert re.search(
            rf"0 needs \| {name}: failed: {name}>=\S+ is missing, which toolkit-lm-\S+ needs",
            capsys.readouterr().out,
        )
    assert driver.exit_code == 1


def test_this_environment_lacks_nothing():
    needs = kit("needs")
    assert [str(lack) for lack in needs.lacking(needs.find_here)] == []


def test_without_toolkit_lm_and_without_a_kit_the_way_to_one_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    done = run_kit("--kit", tmp_path / "none", python=str(python))
    assert (
        done.returncode == 2
        and f"nor is there a kit in {tmp_path / 'none'}: see make gpu-kit" in done.stderr
    )


def test_a_kit_beside_an_installation_and_seconds_that_are_none_are_refused(tmp_path):
    done = run_kit("--kit", tmp_path)
    assert done.returncode == 2 and "toolkit-lm is installed in" in done.stderr
    done = run_kit("--seconds", "0", "--out", tmp_path)
    assert done.returncode == 2 and "--seconds must be more than 0, not 0" in done.stderr
    done = run_kit(python="/no/python")
    assert done.returncode == 2 and "there is no /no/python" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_sources_of_the_kit_are_the_same_bytes_each_time_and_say_what_they_are(
    tmp_path, monkeypatch
):
    collect = kit("collect")
    monkeypatch.setattr(collect, "FOLDERS", ("benchmarks/gpu_kit",))
    for name in ("one", "two"):
        collect.write_sources(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with tarfile.open(tmp_path / "one") as archive:
        assert {"benchmarks/gpu_kit/plan.py", "pyproject.toml", "COMMIT"} <= set(archive.getnames())
        assert re.match(rb"[0-9a-f]{40}( and changes)?\n", archive.extractfile("COMMIT").read())


def test_the_list_of_what_a_machine_has_is_read():
    there = kit("collect").there()
    assert there["torch"].version == "2.11.0" and there["lazy-loader"].version is None
    assert not any("_" in name or "=" in name for name in there)


def test_the_wheels_are_those_of_what_is_lacking_and_of_what_they_need(monkeypatch, tmp_path):
    """Wheels that pip brings are looked into for what they need in turn, and a distribution that is
    there is never brought."""
    collect = kit("collect")
    needs = kit("needs")
    brought = []
    has = {}

    def pip(command, *arguments):
        wanted = [one for one in arguments if "==" in one or ">=" in one]
        brought.append(wanted)
        has.update(
            {
                name: needs.Found(*OURS[name]) if name in OURS else needs.Found("9")
                for name in (re.split("[=>]", one)[0] for one in wanted)
            }
        )

    monkeypatch.setattr(collect, "pip", pip)
    monkeypatch.setattr(collect, "wheel_metadata", lambda folder: has)
    monkeypatch.setattr(
        collect,
        "lacking",
        lambda find, environment: needs.lacking(find, ["toolkit-lm[cuda]"], environment),
    )
    ours = {name: needs.Found(*OURS[name]) for name in OURS if name.startswith("toolkit")}
    collect.download(ours, {}, tmp_path / "wheels")
    assert [[re.split("[=>]", one)[0] for one in wanted] for wanted in brought] == [
        ["fastapi", "msgspec"],
        ["starlette"],
    ]
    has.clear()
    with pytest.raises(
        SystemExit,
        match=r"msgspec>=0.19 is missing, which toolkit-lm-core needs, and 0.1 is there\. A "
        r"distribution that",
    ):
        collect.download(ours, {"msgspec": needs.Found("0.1")}, tmp_path / "others")


def test_the_metadata_of_the_kit_say_what_the_installed_ones_say(tmp_path):
    """Requirements, and the entry points that make plugins of distributions."""
    kit("collect").write_metadata(tmp_path / "metadata")
    made = {
        one.metadata["Name"]: one
        for one in metadata.distributions(path=[str(tmp_path / "metadata")])
    }
    installed = {name: metadata.distribution(name) for name in made}
    assert len(made) > 40
    points = {
        name: {(one.group, one.name, one.value) for one in found.entry_points}
        for name, found in made.items()
    }
    assert points == {
        name: {(one.group, one.name, one.value) for one in found.entry_points}
        for name, found in installed.items()
    }
    assert points["toolkit-lm-tiny"]
    assert {name: found.version for name, found in made.items()} == {
        name: found.version for name, found in installed.items()
    }


WITHOUT_COMPILED = """
import importlib, pkgutil, sys
for package, compiled in (one.split("=") for one in sys.argv[1:]):
    sys.modules[f"{package}.{compiled}"] = None
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if module.name != f"{package}.{compiled}":
            importlib.import_module(module.name)
from toolkit_lm_cpu.library import refusal
print(refusal())
"""


def test_the_kit_has_no_compiled_modules_and_all_others_import_without_them():
    stubs = [path for path in ROOT.glob("*/*/src/*/_*.pyi") if path.name != "__init__.pyi"]
    packages = [f"{path.parent.name}={path.stem}" for path in stubs]
    assert "toolkit_lm_cpu=_kernels" in packages
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILED, *packages], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("its kernels are not there")


def told(**changed):
    smoke = kit("smoke")
    same = {
        "tokens": [[5] * smoke.TOKENS],
        "gaps": [[1.0] * smoke.TOKENS],
        "drawn": [[4] * smoke.DRAWN_TOKENS],
        "likely": [[-1.0, -2.0]],
    }
    return smoke.Told(**{**same, "num_chunks": 5, "replayed": None, **changed})


@pytest.mark.parametrize(
    ("dtype", "changed", "why"),
    [
        ("float32", {"tokens": [[5] * 15 + [6]]}, "other greedy tokens"),
        ("float32", {"drawn": [[4] * 11 + [6]]}, "other seeded draws"),
        ("float32", {"likely": [[-1.0, -2.01]]}, "log probabilities are 0.01"),
        ("bfloat16", {"likely": [[-1.0, -2.5]]}, "log probabilities are 0.5"),
        ("bfloat16", {"likely": [[float("nan"), -2.0]]}, "log probabilities are nan"),
    ],
)
def test_the_smoke_finds_what_is_wrong(dtype, changed, why):
    with pytest.raises(kit("report").MissedError, match=why):
        kit("smoke").compare(told(**changed), told(), dtype, {})


def test_the_smoke_takes_what_is_right():
    off = told(tokens=[[6] * 16], drawn=[[3] * 12], likely=[[-1.1, -2.1]])
    for ours, reference, dtype in (
        (told(), told(), "float32"),
        (told(tokens=[[5] * 15 + [6]]), told(gaps=[[1.0] * 15 + [1e-4]]), "float32"),
        (off, told(), "bfloat16"),
    ):
        found = {}
        kit("smoke").compare(ours, reference, dtype, found)
        assert {"agreeing", "drawn", "off"} <= {*found}


@pytest.mark.slow
def test_the_smoke_of_states_runs_without_a_card_but_for_triton():
    jobs = kit("jobs")
    smoke = kit("smoke")
    job = jobs.module("states", "smoke", "--device", "cpu", "--cases", "hybrid")
    found = {line["check"]: line for line in jobs.run(job, limit=300.0)}
    outcomes = {name: line["outcome"] for name, line in found.items()}
    assert outcomes == {
        "reference: the CPU in float32": "passed",
        **{name: "passed" if name == "fp32 sdpa" else "skipped" for name in smoke.CASES["hybrid"]},
    }, found


def test_graphs_that_have_run_no_step_are_found():
    """An engine that has fallen back to another mode gives the same tokens."""
    check = kit("smoke").check_replayed
    check({"piecewise": 3}, "piecewise")
    check({"piecewise": 3, "full": 2}, "full_and_piecewise")
    for replayed in ({}, {"piecewise": 3}):
        with pytest.raises(
            kit("report").MissedError,
            match="no step ran by a graph that is full, which the mode full_and_piecewise asks",
        ):
            check(replayed, "full_and_piecewise")


def test_tests_are_told_one_by_one_with_their_reasons(tmp_path, monkeypatch):
    """Tests of each file whose names have the word; a dry run takes the first of each file."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist,pytest_timeout")
    file = tmp_path / "test_these.py"
    file.write_text(
        "import pytest\n"
        "def test_cuda_good(): pass\n"
        "def test_other(): pass\n"
        "def test_cuda_bad(): assert 1 == 2\n"
        "def test_cuda_long(): raise ValueError('the cause\\n' + 9000 * 'args ')\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_cuda_skipped(): pass\n"
    )
    tests_of = kit("tests_of")
    jobs = kit("jobs")
    for quick, expected in (
        (False, ["bad failed", "good passed", "long failed", "skipped skipped"]),
        (True, ["good passed", "other passed"]),
    ):
        made = tests_of.job("tests", {file.name: "cuda"}, quick=quick, workers=1)
        made = jobs.Job(
            "tests",
            (*made.command, "--rootdir", str(tmp_path), "-c", os.devnull),
            made.environ,
            ends=False,
        )
        command = tuple(str(file) if one == file.name else one for one in made.command)
        _, lines = drive(
            tmp_path / str(quick), jobs.Job("tests", command, made.environ, ends=False)
        )
        found = {
            f"{re.split('::test_(?:cuda_)?', line['check'])[-1]} {line['outcome']}": line
            for line in lines
        }
        assert sorted(found) == expected
        if not quick:
            assert "assert 1 == 2" in found["bad failed"]["traceback"]
            assert found["bad failed"]["why"].startswith("assert 1 == 2 (")
            assert found["long failed"]["why"].startswith("ValueError: the cause\nargs args")
            assert found["long failed"]["traceback"].endswith("test_these.py:5: ValueError")
            assert found["skipped skipped"]["why"] == "no GPU"


NEEDS_A_CARD = re.compile(
    r'skipif\(not torch\.cuda\.is_available|device = "cuda"|= "cpu" if interprets\(\) else '
    r'"cuda"|"cuda"\] if torch'
)


def test_every_test_that_needs_a_card_is_in_the_kit():
    tests_of = kit("tests_of")
    files = [*tests_of.KITS, *tests_of.GRAPHS, *tests_of.OTHERS]
    assert [file for file, count in Counter(files).items() if count > 1] == []
    assert [file for file in files if not (ROOT / file).is_file()] == []
    own = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("**/tests/**/test_*.py")
        if ".venv" not in path.parts
    }
    found = {file for file in own if NEEDS_A_CARD.search((ROOT / file).read_text())} - {
        "tests/test_gpu_kit.py"
    }
    assert found - set(files) == set(), (
        "these tests need a card: name them in benchmarks/gpu_kit/tests_of.py"
    )
    words = {**tests_of.KITS, **tests_of.OTHERS}
    assert [
        file
        for file, word in words.items()
        if word != "cuda" and word not in (ROOT / file).read_text()
    ] == []


def test_every_attention_backend_for_cards_is_measured_or_tested():
    """Those of model families are operations of PyTorch, which need no kernel for a card."""
    from toolkit_lm.plugin import Plugins

    plan = kit("plan")
    tests_of = kit("tests_of")
    tested = " ".join([*tests_of.KITS, *tests_of.OTHERS])
    for name in Plugins.load().attention_backends:
        is_kernel = name != "cpu" and (ROOT / "contrib_backends" / name).exists()
        assert not is_kernel or name in plan.WITHOUT_GRAPHS or f"/{name}/" in tested, (
            f"{name} is nowhere in the kit"
        )
    assert set(plan.WITH_GRAPHS) <= set(plan.WITHOUT_GRAPHS)


def test_every_job_of_the_plan_is_a_module_or_pytest():
    for quick in (True, False):
        parts = kit("plan").Kit(quick=quick).parts()
        assert [part.ends for part in parts] == sorted(part.ends for part in parts) and parts[
            -1
        ].ends == 1.0
        for one in (job for part in parts for job in part.jobs()):
            assert one.command[0] == "-m"
            name = one.command[1]
            assert (
                name == "pytest"
                or (BENCHMARKS / "gpu_kit" / f"{name.removeprefix('gpu_kit.')}.py").is_file()
            )
            assert quick or "--quick" not in one.command


def test_a_refusal_that_the_first_part_has_heard_keeps_a_process_from_starting():
    made = kit("plan").Kit(quick=False)
    made.refusals = {"triton": "too old a card", "sdpa": None}
    made.limits = {"GPU_KIT_COPY": "1.0"}
    jobs = {job.name: job for part in made.parts() for job in part.jobs()}
    assert jobs["triton"].refusal == jobs["triton, full_and_piecewise"].refusal == "too old a card"
    assert jobs["sdpa"].refusal is None and jobs["sdpa"].environ["GPU_KIT_COPY"] == "1.0"


@pytest.mark.parametrize(("rows", "keys"), [(1, 0), (64, 100)])
def test_a_decode_step_reads_weights_keys_and_values(rows, keys):
    # From the model card of Llama 3 8B: 8.03 B parameters, of which 0.53 B are the embedding, which
    # a step does not read.
    plan = kit("shape_8b").FULL
    weights = plan.product_weights + 2 * plan.vocab_size * plan.hidden
    assert round(weights / 1e9, 2) == 8.03
    cached = rows * keys * 2 * 32 * 8 * 128
    assert plan.decode_bytes(rows, keys) == 2 * (weights - plan.vocab_size * plan.hidden + cached)


@pytest.mark.slow
def test_the_shapes_are_read_at_their_real_sizes(tmp_path):
    """No weights are made: what the configs say is enough for the choices of an engine."""
    from toolkit_lm.config import VllmConfig
    from toolkit_lm_cli.explanation import explain

    shapes = kit("shapes")
    options = {name: (write, given) for name, (write, _, _, given) in shapes.SHAPES.items()}
    options["8B"] = (
        lambda folder, quick: kit("shape_8b").FULL.write(folder),
        {"renderer": "tokens"},
    )
    for number, (name, (write, given)) in enumerate(options.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, False)
        found = explain(
            VllmConfig.default(
                model=str(folder), load_format="dummy", device="cpu", dtype="bfloat16", **given
            )
        )
        parameters = sum(rank.num_parameters for rank in found.ranks)
        expected = {
            "BART large": 0.41e9,
            "Whisper small": 0.24e9,
            "LLaVA 1.5 7B": 7.06e9,
            "MiniLM": 22.6e6,
            "8B": 8.03e9,
        }[name]
        assert parameters == pytest.approx(expected, rel=0.05), name


def test_modules_of_the_kit_import_no_torch_where_the_driver_imports_them():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import sys, gpu_kit.__main__; print([m for m in ('torch', 'toolkit_lm') if m in "
                "sys.modules])"
            ),
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.fixture
def generator():
    spec = importlib.util.spec_from_file_location("generate_gpu", ROOT / "docs" / "generate_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_about_gpus_is_current(generator):
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), (
        "gpu.md is out of date: run python docs/generate_gpu.py"
    )


def test_the_page_says_first_what_has_run_and_what_has_not(generator, tmp_path):
    assert generator.text([]).startswith("\n**No GPU has run anything of this project**")
    results = kit("results").Results(tmp_path, "gpu")
    plan = kit("shape_8b").FULL
    results.add(
        {"date": "2030-01-02", "commit": "0123456789abcdef", "seconds": 480, "quick": False}
    )
    checks = [
        ("0", "machine", "card", {"card": "NVIDIA X", "driver": "1.2"}),
        (
            "0",
            "machine",
            "versions",
            {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", "python": "3.12.3"},
        ),
        ("A", "smoke", "fp32 sdpa", {"off": 0.0}),
        ("B", "kits", "test_x", {"outcome": "failed", "why": "assert 1 == 2", "traceback": "..."}),
        (
            "E2",
            "triton",
            plan.decode_name(64, plan.short),
            {"step_ms": 9.5, "tokens_per_second": 6700.0, "share": 0.9},
        ),
        (
            "E2",
            "triton",
            plan.decode_name(1, plan.short),
            {"step_ms": 9.0, "tokens_per_second": 110.0, "share": 0.6},
        ),
        ("F", "flex", "process", {"outcome": "skipped", "why": "no kernel"}),
        ("G", "shapes", "process", {"outcome": "unrun", "why": "no time was left"}),
    ]
    for part, job, check, found in checks:
        results.add({"part": part, "job": job, "check": check, "outcome": "passed", **found})
    text = generator.text(kit("results").all_of_cards(tmp_path))
    assert text.startswith(
        "\n**The kit ran on NVIDIA X (driver 1.2) on 2030-01-02**, with torch 2.11.0, triton "
        "3.6.0, transformers 5.17.0, python 3.12.3, at "
        "0123456789ab. Of its checks: 5 passed, 1 failed, 1 could not run there, 1 were not "
        "reached."
    )
    for row in (
        "| parity: checks of parts A to D that fail | 1 | **no** |",
        "| decode, 64 rows, with graphs: at least 85 % of the copy bandwidth | 90% | yes |",
        "| decode, 1 row, with graphs: at least 70 % of the copy bandwidth | 60% | **no** |",
        "| prefill: at least 60 % of the matrix rate | not measured | |",
        "| triton | decode, 64 rows after 16 tokens | 9.50 ms | 6,700 | 90% |",
        "- B kits, 1 failed: assert 1 == 2",
        "- G shapes, 1 were not reached: no time was left",
    ):
        assert row in text


def test_the_page_has_the_last_result_of_each_check(generator, tmp_path):
    for date, outcomes in ("2030-01-02", ("failed", "passed")), ("2030-01-03", ("passed",)):
        path = tmp_path / f"gpu-{date.replace('-', '')}.json"
        lines = [{"date": date, "commit": "0123456789abcdef", "seconds": 480, "quick": False}]
        for number, outcome in enumerate(outcomes):
            lines.append(
                {"part": "B", "job": "kits", "check": f"test_{number}", "outcome": outcome}
            )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = generator.text(kit("results").all_of_cards(tmp_path))
    assert " on 2030-01-03**" in text
    assert "Of its checks, each as the last of 2 runs had it: 2 passed.\n" in text


def test_the_goals_are_of_checks_that_the_kit_makes(generator):
    """A goal whose check has another name would never be measured."""
    plan = kit("shape_8b").FULL
    speed = kit("speed")

    class Named:
        is_compiled = False

    bench = Named()
    bench.plan = plan
    names = {*speed.measurements(bench), speed.START}
    wanted = {
        name
        for goal in generator.GOALS
        if goal.found is not generator.parity
        for name in [goal.found.__closure__[0].cell_contents]
    }
    assert len(wanted) == 4 and wanted <= names


def test_the_guide_lists_the_parts():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    plan = kit("plan")
    rows = re.findall(
        r"^\| (\w+) \| .* \| (\d+) \|$",
        text.partition("## GPUs")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    assert rows == [
        (part.name, f"{plan.SECONDS * part.ends:.0f}") for part in plan.Kit(quick=False).parts()
    ]
