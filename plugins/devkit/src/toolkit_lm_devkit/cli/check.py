"""`toolkit plugins check`: what an installed distribution would do better to change."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table
from rich.text import Text
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import PluginError, ToolkitError, nearest
from toolkit_lm.plugin import (
    API_VERSION,
    CORE_DISTRIBUTION,
    Candidate,
    CheckpointRegistry,
    Entry,
    Plugins,
    Registry,
    by_hook,
    discover,
)
from toolkit_lm_commands import engine_command

from toolkit_lm_devkit.cli.private_names import CORE, private_names

SLOW_IMPORT = 0.1
"""Seconds of CPU time that importing an entry module may take."""
HEAVY_PACKAGES = ("torch", "transformers")
"""Packages that an entry module must not import."""
_MEASURE = """
import importlib, json, sys, time
from toolkit_lm.plugin import Plugins
before, start = set(sys.modules), time.thread_time()
importlib.import_module(sys.argv[1])
seconds = time.thread_time() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


@dataclass(slots=True)
class EntryModule:
    """Cost of importing a plugin's entry module in a fresh process."""

    plugin: str
    module: str
    import_seconds: float
    """CPU time."""
    imports: list[str]
    """Packages that it imports, except its own, core, and the standard library."""


@dataclass(slots=True)
class Report:
    """Findings about a distribution. `problems` is empty if all is well."""

    distribution: str
    version: str | None
    requires_core: str | None
    """The versions of core that it admits."""
    entry_modules: list[EntryModule] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    targets: dict[str, str] = field(default_factory=dict)
    """Key -> what is registered under it."""
    private_names: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@engine_command(PluginsConfig)
def check_plugin(
    distribution: Annotated[
        str, typer.Argument(metavar="DIST", help="Name of an installed distribution.")
    ],
    config: PluginsConfig,
    plugins: Plugins,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a plugin's distribution: import time, private names of core, version of the contract,
    hooks, targets."""
    report = check(distribution, plugins)
    if json_output:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    if report.problems:
        raise typer.Exit(1)


def check(distribution: str, plugins: Plugins) -> Report:
    """Examines an installed distribution; `plugins` are the loaded ones. Raises PluginError when it
    brings no plugin."""
    name = canonicalize_name(distribution)
    installed = discover(plugins.config)
    candidates = [c for c in installed if c.info.distribution == name]
    if not candidates:
        known = {c.info.distribution for c in installed if c.info.distribution}
        raise PluginError(
            f"no distribution {distribution!r} that has plugins is installed. "
            f"{nearest(name, known)}"
        )
    report = Report(name, candidates[0].info.version, candidates[0].requirement)
    report.problems += _version_problems(candidates[0])
    for candidate in candidates:
        _measure(candidate, report)
    # Another distribution may have a plugin of the same name.
    for info in (info for info in plugins.infos if info.distribution == name):
        report.hooks += info.hooks
        if info.status != "ok":
            report.problems.append(
                f"plugin {info.name!r} is {info.status}{': ' + info.error if info.error else ''}"
            )
    _check_targets(name, plugins, report)
    packages = {entry.module.split(".")[0] for entry in report.entry_modules}
    packages |= {target.partition(":")[0].split(".")[0] for target in report.targets.values()}
    report.private_names = [
        found for file in _sources(packages - {CORE}) for found in private_names(file)
    ]
    report.problems += [f"private name of core: {found}" for found in report.private_names]
    return report


def _version_problems(candidate: Candidate) -> Iterator[str]:
    major, minor = API_VERSION.split(".")
    wanted = f"{CORE_DISTRIBUTION}>={API_VERSION},<{major}.{int(minor) + 1}"
    if candidate.requirement is None:
        yield (
            f"it requires no version of {CORE_DISTRIBUTION}: a later core may break it. Require "
            f"{wanted}"
        )
    elif Requirement(f"{CORE_DISTRIBUTION}{candidate.requirement}").specifier.contains("9999"):
        yield (
            f"{CORE_DISTRIBUTION}{candidate.requirement} admits every later core, which may "
            f"break it. Require {wanted}"
        )


def _measure(candidate: Candidate, report: Report) -> None:
    assert candidate.entry is not None, "what is installed has an entry point"
    name = candidate.info.name
    module = candidate.entry.module
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, module], env=environ, capture_output=True, text=True
    )  # nosec B603 # our own words
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it gives no message"])[-1]
        report.entry_modules.append(EntryModule(name, module, 0.0, []))
        report.problems.append(
            f"entry module {module} of plugin {name!r} cannot be imported: {last}"
        )
        return
    seconds, found = json.loads(done.stdout.splitlines()[-1])
    own = {module.split(".")[0], CORE, *sys.stdlib_module_names}
    imports = [package for package in found if package not in own and not package.startswith("_")]
    report.entry_modules.append(EntryModule(name, module, round(seconds, 4), imports))
    heavy = [package for package in imports if package in HEAVY_PACKAGES]
    if heavy or seconds > SLOW_IMPORT:
        cause = f"imports {' and '.join(heavy)}" if heavy else "is slow"
        report.problems.append(
            f"entry module {module} {cause}: {seconds:.2f} s of CPU time at each start. Import "
            "it in the target modules instead"
        )


def _check_targets(distribution: str, plugins: Plugins, report: Report) -> None:
    for registry in by_hook(plugins).values():
        for entry in registry.entries():
            if entry.owner.distribution == distribution:
                report.targets[f"{registry.noun} {entry.key}"] = entry.shown
                if problem := _target_problem(registry, entry):
                    report.problems.append(problem)


def _target_problem(registry: Registry[Any], entry: Entry) -> str | None:
    try:
        if isinstance(registry, CheckpointRegistry):
            registry.path(entry.key)
            return None
        target = registry.load(entry.key)
        if registry.noun == "model architecture":
            from toolkit_lm.model import check_constructor

            check_constructor(target)
    except ToolkitError as error:
        return str(error)
    return None


def _sources(packages: set[str]) -> Iterator[Path]:
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            yield from sorted(Path(folder).rglob("*.py"))
        if spec.origin and not spec.submodule_search_locations:
            yield Path(spec.origin)


def _print(report: Report) -> None:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("distribution", f"{report.distribution} {report.version}")
    table.add_row(
        "requires",
        f"{CORE_DISTRIBUTION}{report.requires_core or ' (any version)'}; this is API {API_VERSION}",
    )
    for entry in report.entry_modules:
        pulled = ", ".join(entry.imports) or "nothing"
        table.add_row(
            f"plugin {entry.plugin}",
            f"{entry.module}: {1000 * entry.import_seconds:.0f} ms, imports {pulled}",
        )
    table.add_row("hooks", ", ".join(report.hooks) or "none")
    for hook, target in report.targets.items():
        table.add_row(hook, target)
    for problem in report.problems:
        table.add_row(Text("problem", style="red"), problem)
    Console(markup=False, emoji=False).print(table)
    typer.echo(f"{len(report.problems)} problems" if report.problems else "no problems")
