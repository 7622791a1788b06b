"""A small checkpoint without weights, for `toolkit`; which tests `make test` leaves out; and how
long each test takes, where TOOLKIT_DURATIONS names a file."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PathDistribution
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what is outside from deciding what tests find."""
    # Whoever starts the tests in the background has them ignore SIGINT, and what they start would
    # inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # xFormers asks once whether a GPU is there, perhaps while a test says so. It then imports
    # kernels that warn.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("XFORMERS_FORCE_DISABLE_TRITON", "1")
    # Where a test states no time, httpx waits for 5 seconds: a busy machine may take longer.
    waits = inspect.signature(httpx.get).parameters["timeout"].default
    waits.connect = waits.read = waits.write = waits.pool = 60.0


REPOSITORY = {
    "tests/test_advisories.py",
    "tests/test_api_reference.py",
    "tests/test_budgets.py",
    "tests/test_changes.py",
    "tests/test_chart.py",
    "tests/test_clients_page.py",
    "tests/test_commits.py",
    "tests/test_copied_faults.py",
    "tests/test_coverage.py",
    "tests/test_deploy.py",
    "tests/test_docs.py",
    "tests/test_gpu_kit.py",
    "tests/test_guard.py",
    "tests/test_installed.py",
    "tests/test_kernel_counts.py",
    "tests/test_patience.py",
    "tests/test_race.py",
    "tests/test_release.py",
    "tests/test_soak.py",
    "tests/test_walk.py",
    "tests/test_workspace.py",
}
"""Files of tests of the repository itself and of its benchmarks."""


LONGEST = {
    "contrib_backends/compile/tests/test_compile_engine.py",
    "contrib_backends/compile/tests/test_compile_parity.py",
    "contrib_backends/compile/tests/test_graphs.py",
    "contrib_backends/executor_mp/tests/test_mp_faults.py",
    "contrib_backends/executor_mp/tests/test_mp_nodes.py",
    "contrib_backends/triton/tests/test_interpreter.py",
    "plugins/ray_serve/tests/test_serve_app.py",
    "tests/security/test_openapi.py",
    "tests/test_body_memory.py",
    "tests/test_commands.py",
    "tests/test_crashes.py",
    "tests/test_doors.py",
    "tests/test_faults.py",
    "tests/test_installed.py",
    "tests/test_plugins.py",
    "tests/test_process.py",
    "tests/test_soak.py",
    "tests/test_types.py",
}
"""Files that begin first, so that at the end no process waits for one of them."""


DAILY = 6
"""Cases of a matrix of which `make test-all` runs the first."""


def by_day(cases: list[pytest.Function]) -> list[pytest.Function]:
    """The cases of a matrix that `make test-all` runs: the first of each DAILY, and as few more as
    a greedy choice finds for the values of parameters that those lack."""
    rows = [case.callspec.params for case in cases]
    # Cases share the objects that a parameter has as values.
    columns = [[id(row[name]) for row in rows] for name in rows[0]]
    parameters = [column for column in columns if len(set(column)) < len(cases)]
    values = [
        {(parameter, column[case]) for parameter, column in enumerate(parameters)}
        for case in range(len(cases))
    ]
    missing = set().union(*values).difference(*values[::DAILY])
    chosen = cases[::DAILY]
    while missing:
        best = max(range(len(cases)), key=lambda case: len(values[case] & missing))
        chosen.append(cases[best])
        missing -= values[best]
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves to `make test-all`: tests of the repository, and long ones; and
    what that leaves to `make test-nightly` of large matrices. The longest files come first."""
    tests = Path(__file__).with_name("tests")
    matrices: dict[str, list[pytest.Function]] = {
        test: [] for test in tests.joinpath("matrices.txt").read_text().split()
    }
    for item in items:
        cases = matrices.get(item.nodeid.partition("[")[0])
        is_case = cases is not None and isinstance(item, pytest.Function)
        if is_case and hasattr(item, "callspec") and not any(item.iter_markers("nightly")):
            cases.append(item)
    for cases in matrices.values():
        kept = set(by_day(cases)) if cases else ()
        for case in cases:
            if case not in kept:
                case.add_marker("nightly")
    long = set(tests.joinpath("long.txt").read_text().split())
    begun = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.nodeid.partition("::")[0] in REPOSITORY:
            item.add_marker("repository")
        if test in long or (test in begun and f"{test}[1:]" in long):
            item.add_marker("long")
        begun.add(test)
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in LONGEST)


_SEED = 67280421310721
"""torch's own, of a process that seeds nothing."""


_RECURSION_LIMIT = sys.getrecursionlimit()


def _seed() -> None:
    """Without it, what a test draws would depend on the tests that ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(_SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seeds the random numbers that a test module draws at its import."""
    if isinstance(collector, pytest.Module):
        _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds the random numbers of a test and of its fixtures. Resets the recursion limit, which
    mypy and Inductor raise: endless recursion would take many seconds."""
    _seed()
    sys.setrecursionlimit(_RECURSION_LIMIT)


_THRESHOLDS = gc.get_threshold()
_NEW_MODULES = 200
"""Modules imported since the last freeze, from which on their objects are frozen, too."""
_num_modules = 0
_num_frozen = 0
_count_frozen = gc.get_freeze_count


@functools.wraps(_count_frozen)
def _frozen_at_last() -> int:
    return _num_frozen


def _freeze() -> None:
    """Has no collection of garbage look again at what exists. Each start of an engine asks how much
    is frozen, which Python counts object by object: it is counted here, once."""
    global _num_modules, _num_frozen
    gc.freeze()
    _num_modules = len(sys.modules)
    _num_frozen = _count_frozen()
    gc.get_freeze_count = _frozen_at_last


_texts: dict[tuple[str, int, int], str | None] = {}
_read_text = PathDistribution.read_text


@functools.wraps(_read_text)
def _read_once(distribution: PathDistribution, filename: str) -> str | None:
    """Text of a distribution's metadata. Each start of an engine reads hundreds of such files to
    find plugins: one that is as it was is read once."""
    try:
        path = os.path.join(distribution._path, filename)
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except (OSError, TypeError):
        return _read_text(distribution, filename)
    key = (path, found.st_mtime_ns, found.st_size)
    if key not in _texts:
        _texts[key] = _read_text(distribution, filename)
    return _texts[key]


PathDistribution.read_text = _read_once


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects tests without collections of garbage, and freezes what was made: two million objects
    and hardly any garbage. Else each full collection would take a second or more."""
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file: the collector as it was before, and what its tests have imported is frozen."""
    if nextitem is not None and nextitem.path == item.path:
        return
    gc.set_threshold(*_THRESHOLDS)
    if len(sys.modules) > _num_modules + _NEW_MODULES:
        gc.collect()
        _freeze()


def pytest_unconfigure() -> None:
    gc.get_freeze_count = _count_frozen
    PathDistribution.read_text = _read_text
    gc.unfreeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds a line for each part of each test: seconds, part, outcome, name. tests/durations.py sums
    them up."""
    path = os.environ.get("TOOLKIT_DURATIONS")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as lines:
            lines.write(
                f"{report.duration:.3f}\t{report.when}\t{report.outcome}\t{report.nodeid}\n"
            )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama in Hugging Face layout, with a byte-level tokenizer and a chat template:
    for --load-format dummy."""
    folder = tmp_path_factory.mktemp("checkpoint")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {letter: number for number, letter in enumerate(letters, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": template})
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(vocab),
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def checkpoint_with(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """checkpoint_with(template, marks): the same with another chat template. `marks`: texts that
    are tokens of their own."""

    def checkpoint_with(
        template: str, marks: Sequence[str] = (), *, special: bool = False, longest: int = 256
    ) -> Path:
        folder = shutil.copytree(
            checkpoint, tmp_path_factory.mktemp("checkpoint_with") / "checkpoint"
        )
        told = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**told, "chat_template": template})
        )
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_tokens(
            [AddedToken(mark, special=special, normalized=False) for mark in marks]
        )
        tokenizer.add_special_tokens(["<eos>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(
                {
                    **config,
                    "vocab_size": tokenizer.get_vocab_size(),
                    "max_position_embeddings": longest,
                }
            )
        )
        return folder

    return checkpoint_with
