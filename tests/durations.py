"""Prints where the tests' time goes: durations.py FILE. A run writes FILE if TOOLKIT_DURATIONS
names it.

Prints Markdown tables of seconds. `durations.py FILE --long` prints what belongs into
tests/long.txt, and `durations.py FILE --matrices` what belongs into tests/matrices.txt, from a run
of all tests on a machine that does nothing else.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

MOST = 60
"""Files, and tests, that are listed."""
LONG = 0.8
"""Seconds of a test with all its variants from which on it is left to `make test-all`."""
FIRST = 0.8
"""Seconds that the first of several variants may take, to stay in `make test`."""
ONLY = 2.0
"""Seconds that the shortest test of a file may take, to stay where all others are long."""
MATRIX = 2
"""Cases from which on a test is a matrix."""
LARGE = 1.0
"""Seconds of a matrix from which on `make test-all` takes a part of it."""
WHOLE = (
    "contrib_backends/executor_mp/",
    "core/tests/scheduler/",
    "libs/media/tests/test_fetch.py",
    "plugins/cli/tests/test_hub.py",
    "plugins/fronts/tests/test_fronts.py",
    "plugins/mcp/tests/test_protocol.py",
    "plugins/server/tests/test_keep_alive.py",
    "plugins/vendor_apis/tests/test_streams.py",
    "tests/security/",
    "tests/test_commands.py",
    "tests/test_crashes.py",
    "tests/test_docs.py",
    "tests/test_faults.py",
    "tests/test_installed.py",
    "tests/test_kv_tier_kit.py",
    "tests/test_kv_transfer.py::test_a_peer",
    "tests/test_page_markdown.py",
    "tests/test_secrets.py",
    "tests/test_workspace.py",
)
"""Where the matrices are that find different faults in each of their cells, and so are not cut."""
INTERPRETED = (
    "contrib_backends/triton/tests/test_triton_kernels.py::test_keys_that_programs_share",
    "contrib_backends/triton/tests/test_triton_kernels.py::test_what_a_row_gives_does_not_depend_on_the_rows_beside_it",
    "contrib_backends/triton/tests/test_triton_kit.py::TestTriton::test_equals_the_formula",
    "contrib_backends/triton/tests/test_triton_quantized.py::test_products",
    "contrib_backends/triton/tests/test_triton_states.py::test_cuts_change_little_and_neighbours_nothing",
    "contrib_backends/triton/tests/test_triton_states.py::test_linear_attention_is_its_formula",
)
"""Large matrices of the processes in which Triton's interpreter runs, which FILE does not have."""


def tables(lines: list[str]) -> str:
    """The longest files and the longest tests. `lines`: "seconds, part, outcome, name" with tabs
    between, as conftest.py writes them."""
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for line in lines:
        seconds, part, _, name = line.split("\t", 3)
        file = name.partition("::")[0]
        files[file] += float(seconds)
        tests[name] += float(seconds)
        counts[file] += part == "setup"
    told = [
        f"{counts.total()} tests, {sum(files.values()):.0f} seconds in all",
        "",
        "| seconds | tests | file |",
        "| --- | --- | --- |",
    ]
    told += [
        f"| {seconds:.0f} | {counts[file]} | {file} |" for file, seconds in files.most_common(MOST)
    ]
    told += ["", "| seconds | test |", "| --- | --- |"]
    told += [f"| {seconds:.1f} | {name} |" for name, seconds in tests.most_common(MOST)]
    return "\n".join(told)


def long(lines: list[str]) -> list[str]:
    """The tests that are long, as conftest.py reads them. `lines` as for `tables`.

    "FILE::TEST" are all its variants, and "FILE::TEST[1:]" those after the first. Of each file at
    least one test is not listed, where that takes a few seconds at most.
    """
    tests: dict[str, dict[str, float]] = {}
    for line in lines:
        seconds, _, _, name = line.split("\t", 3)
        variants = tests.setdefault(name.partition("[")[0], {})
        variants[name] = variants.get(name, 0) + float(seconds)
    listed = {}
    files = {}
    for test, variants in tests.items():
        total = sum(variants.values())
        first = next(iter(variants.values()))
        files.setdefault(test.partition("::")[0], []).append((total, test))
        if total > LONG:
            listed[test] = f"{test}[1:]" if len(variants) > 1 and first <= FIRST else test
    for alike in files.values():
        shortest, test = min(alike)
        if all(listed.get(name) == name for _, name in alike) and shortest <= ONLY:
            del listed[test]
    return sorted(listed.values())


def matrices(lines: list[str]) -> list[str]:
    """The matrices of which `make test-all` takes a part, as conftest.py reads them. `lines` as for
    `tables`."""
    tests: dict[str, Counter[str]] = {}
    for line in lines:
        seconds, _, _, name = line.split("\t", 3)
        tests.setdefault(name.partition("[")[0], Counter())[name] += float(seconds)
    large = {
        test
        for test, cases in tests.items()
        if len(cases) >= MATRIX and cases.total() > LARGE and not test.startswith(WHOLE)
    }
    return sorted(large | set(INTERPRETED))


if __name__ == "__main__":
    told = Path(sys.argv[1]).read_text().splitlines()
    if "--long" in sys.argv:
        print("\n".join(long(told)))
    elif "--matrices" in sys.argv:
        print("\n".join(matrices(told)))
    else:
        print(tables(told))
