"""Results for people, as tables, and for programs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from toolkit_lm.errors import ConfigError

from toolkit_lm_bench.figures import METRICS

if TYPE_CHECKING:
    from toolkit_lm_bench.figures import Figures
    from toolkit_lm_bench.offline import Latency, Throughput
    from toolkit_lm_bench.serve import Served, SweepSetup
    from toolkit_lm_bench.startup import Startup


def check_output(path: Path | None) -> None:
    """Raises ConfigError for a file that cannot be written, before anything is measured."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(
            f"option 'output': {str(path)!r} cannot be written: it is a folder, or its folder is "
            "missing."
        )


def write_json(row: Any, *, path: Path | None, is_wanted: bool) -> None:
    """To a file, where there is a path, and to stdout, where it is wanted. Raises ConfigError."""
    text = json.dumps(row, indent=2)
    if path is not None:
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"option 'output': {str(path)!r} cannot be written: {error}"
            ) from error
    if is_wanted:
        typer.echo(text)


def plan_as_json(plan: SweepSetup) -> dict[str, Any]:
    """The options, without the key of the server."""
    row = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": plan.target.url,
        "endpoint": plan.endpoint,
    }
    for section in (plan.dataset, plan.sampling, plan.options):
        row |= msgspec.to_builtins(section)
    return row


def served_as_json(served: Served) -> dict[str, Any]:
    """An endless rate is "inf", which JSON has no number for."""
    rate = "inf" if isinf(served.load.request_rate) else served.load.request_rate
    return {
        "model": served.model,
        "request_rate": rate,
        "concurrency": served.load.concurrency,
        **served.figures.as_json(),
    }


def print_startup(found: Sequence[Startup], model: str) -> None:
    """`found`: of one way."""
    table = Table("phase", *(startup.state for startup in found))
    for phase in dict.fromkeys(phase for startup in found for phase in startup.phases):
        table.add_row(phase, *(f"{startup.phases.get(phase, 0.0):.2f}" for startup in found))
    table.add_section()
    table.add_row("start to first token", *(f"{startup.total:.2f}" for startup in found))
    _print(f"{model}, {found[0].way}: seconds, medians of {found[0].runs}", table)


def print_throughput(found: Throughput, model: str) -> None:
    table = _pairs()
    table.add_row("requests per second", f"{found.requests_per_second:.2f}")
    table.add_row("output tokens per second", f"{found.output_tokens_per_second:.1f}")
    table.add_row("tokens per second, prompts included", f"{found.total_tokens_per_second:.1f}")
    table.add_section()
    table.add_row("seconds", f"{found.elapsed_time:.2f}")
    table.add_row("requests", str(found.num_requests))
    table.add_row("prompt tokens", str(found.num_prompt_tokens))
    table.add_row("output tokens", str(found.num_output_tokens))
    _add_acceptance(table, found)
    _print(f"{model}: median of {len(found.elapsed_times)} runs", table)


def print_latency(found: Latency, model: str) -> None:
    table = _pairs()
    table.add_row("mean", f"{found.avg_latency:.3f}")
    for number, seconds in found.percentiles.items():
        table.add_row(f"p{number:g}", f"{seconds:.3f}")
    shape = (
        f"{found.batch_size} prompts of {found.input_len} tokens, {found.output_len} output "
        "tokens each"
    )
    _print(f"{model}, {shape}: seconds of a call, {len(found.latencies)} calls", table)


def print_served(served: Served) -> None:
    """Numbers of the run, and a row for each metric."""
    figures = served.figures
    table = _pairs()
    table.add_row("completed requests", str(figures.completed))
    table.add_row("failed requests", str(figures.failed))
    table.add_row("seconds", f"{figures.duration:.2f}")
    table.add_row("prompt tokens", str(figures.total_input_tokens))
    table.add_row("output tokens", str(figures.total_output_tokens))
    table.add_section()
    table.add_row("requests per second", f"{figures.request_throughput:.2f}")
    if figures.request_goodput is not None:
        table.add_row("good requests per second", f"{figures.request_goodput:.2f}")
    table.add_row("output tokens per second", f"{figures.output_throughput:.1f}")
    table.add_row("tokens per second, prompts included", f"{figures.total_token_throughput:.1f}")
    _add_acceptance(table, figures)
    _print(f"{served.model}, {served.load.name}", table)
    if figures.distributions:
        numbers = next(iter(figures.distributions.values())).percentiles
        times = Table("milliseconds", "", "mean", *(f"p{number:g}" for number in numbers))
        for name, found in figures.distributions.items():
            cells = [found.mean, *found.percentiles.values()]
            times.add_row(name.upper(), METRICS[name], *(f"{cell:.2f}" for cell in cells))
        _print("", times)


def _add_acceptance(table: Table, figures: Figures | Throughput) -> None:
    """Adds rows for speculative decoding, if there were drafts."""
    if figures.draft_acceptance is not None:
        table.add_row("accepted drafts per draft", f"{figures.draft_acceptance:.2f}")
        table.add_row("output tokens per step", f"{figures.acceptance_length:.2f}")
    for name, accepted in figures.drafters.items():
        table.add_row(f"accepted drafts per draft of {name}", f"{accepted:.2f}")


def print_sweep(points: Sequence[Served]) -> None:
    """A row for each load."""
    numbers = next(
        (list(d.percentiles) for point in points for d in point.figures.distributions.values()), []
    )
    has_goodput = any(point.figures.request_goodput is not None for point in points)
    shown = (
        [(metric, number) for metric in ("ttft", "tpot") for number in (numbers[0], numbers[-1])]
        if numbers
        else []
    )
    shown = list(dict.fromkeys(shown))
    heads = [f"{metric.upper()} p{number:g}, ms" for metric, number in shown]
    table = Table(
        "load",
        "requests/s",
        *(["good/s"] if has_goodput else []),
        "output tokens/s",
        *heads,
        "failed",
    )
    for point in points:
        figures = point.figures
        found = point.figures.distributions
        cells = [
            f"{figures.request_throughput:.2f}",
            *([f"{figures.request_goodput or 0:.2f}"] if has_goodput else []),
        ]
        cells.append(f"{figures.output_throughput:.1f}")
        cells += [
            f"{found[metric].percentiles[number]:.2f}" if metric in found else "-"
            for metric, number in shown
        ]
        table.add_row(point.load.name, *cells, str(figures.failed))
    _print(points[0].model, table)


def tell_doubts(points: Sequence[Served]) -> None:
    """Print caveats about the numbers on stderr."""
    counted = sum(point.figures.counted for point in points)
    if counted:
        typer.echo(
            f"note: the server reported no usage for {counted} requests. Output tokens are events "
            "with text, which may hold several "
            "tokens; of prompts, only those of token ids are counted.",
            err=True,
        )
    failed = sum(point.figures.failed for point in points)
    if failed:
        reason = next(point.figures.first_error for point in points if point.figures.failed)
        typer.echo(f"error: {failed} requests failed, the first with: {reason}", err=True)


def _pairs() -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table


def _print(title: str, table: Table) -> None:
    """Print a table. Lines are not wrapped in a file or a pipe."""
    if title:
        typer.echo(title)
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)
