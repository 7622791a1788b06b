"""The commands of `toolkit bench`. What measures is imported when it is asked for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, nearest
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import engine_command

from toolkit_lm_bench.options import (
    DatasetOptions,
    FigureOptions,
    Load,
    LoadOptions,
    SamplingOptions,
    TargetOptions,
    concurrency as parse_concurrency,
    request_rate as parse_rate,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="File for the results, as JSON.")]
ServedModel = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Model, as the server calls it. Default: its first one."),
]


@engine_command()
def startup(
    config: VllmConfig,
    plugins: Plugins,
    runs: Annotated[
        int, typer.Option(min=1, help="Number of starts of each kind. The median is shown.")
    ] = 3,
    ways: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Ways to start. offline: LLM in a process of its own. server: toolkit serve.",
        ),
    ] = "offline,server",
    states: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="States of the machine. cold: no file in memory, no bytecode. warm: right after "
            "another start.",
        ),
    ] = "cold,warm",
    json_output: AsJson = False,
    output: Output = None,
) -> None:
    """Measure the time from the start of a process to its first token.

    Cold: the files of the checkpoint and of all installed packages are dropped from the page cache,
    unless a process has them mapped. Python finds no bytecode, and compiles each module that it
    imports. Warm: the same start was made just before.
    """
    from toolkit_lm_bench import report
    from toolkit_lm_bench.startup import STATES, WAYS, measure

    report.check_output(output)
    found = [
        measure(config, plugins, way, state, runs)
        for way in _names(ways, "ways", tuple(WAYS))
        for state in _names(states, "states", STATES)
    ]
    report.write_json([asdict(startup) for startup in found], path=output, is_wanted=json_output)
    if not json_output:
        for way in dict.fromkeys(startup.way for startup in found):
            report.print_startup(
                [startup for startup in found if startup.way == way], config.model.model
            )


@engine_command(DatasetOptions, SamplingOptions)
def throughput(
    config: VllmConfig,
    plugins: Plugins,
    dataset: DatasetOptions,
    sampling: SamplingOptions,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs. The median is shown.")] = 3,
    warmup: Annotated[
        int, typer.Option(min=0, help="Number of runs before, which are not measured.")
    ] = 1,
    json_output: AsJson = False,
    output: Output = None,
) -> None:
    """Measure the throughput of LLM: all prompts of a dataset as one batch.

    Random token ids are below --vocab-size and below the vocabulary size of the model. Each run has
    prompts of its own.
    """
    from toolkit_lm_bench import report
    from toolkit_lm_bench.offline import measure_throughput

    report.check_output(output)
    found = measure_throughput(config, plugins, dataset, sampling, repeats=repeats, warmup=warmup)
    report.write_json(
        {"model": config.model.model, **asdict(found)}, path=output, is_wanted=json_output
    )
    if not json_output:
        report.print_throughput(found, config.model.model)


@engine_command(SamplingOptions, FigureOptions)
def latency(
    config: VllmConfig,
    plugins: Plugins,
    sampling: SamplingOptions,
    figures: FigureOptions,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts of a call.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Number of calls.")] = 10,
    warmup: Annotated[
        int, typer.Option(min=0, help="Number of calls before, which are not measured.")
    ] = 3,
    json_output: AsJson = False,
    output: Output = None,
) -> None:
    """Measure how long LLM takes for one batch of random prompts, from the call to its return."""
    from toolkit_lm_bench import report
    from toolkit_lm_bench.offline import measure_latency

    report.check_output(output)
    found = measure_latency(
        config,
        plugins,
        sampling,
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        warmup=warmup,
        percentiles=figures.percentiles,
    )
    report.write_json(
        {"model": config.model.model, **found.as_json()}, path=output, is_wanted=json_output
    )
    if not json_output:
        report.print_latency(found, config.model.model)


@engine_command(TargetOptions, DatasetOptions, SamplingOptions, LoadOptions, FigureOptions)
def serve(
    target: TargetOptions,
    dataset: DatasetOptions,
    sampling: SamplingOptions,
    options: LoadOptions,
    figures: FigureOptions,
    model: ServedModel = None,
    request_rate: Annotated[
        str,
        typer.Option(
            metavar="NUMBER",
            help="Requests per second, with exponential gaps (a Poisson process). inf: all at "
            "once.",
        ),
    ] = "inf",
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER",
            help="Most requests under way. The others wait at the client. Default: no bound.",
        ),
    ] = None,
    json_output: AsJson = False,
    output: Output = None,
) -> None:
    """Measure a server that speaks OpenAI's API, with streamed requests.

    Times are those of the client. The exit code is 1 when all requests fail.
    """
    from toolkit_lm_bench import report
    from toolkit_lm_bench.serve import SweepSetup, serve as measure

    report.check_output(output)
    load = Load(
        parse_rate(request_rate),
        None if concurrency is None else parse_concurrency(concurrency, "concurrency"),
    )
    plan = SweepSetup(target, dataset, sampling, options, figures, model)
    found = measure(plan, load)
    report.write_json(
        report.plan_as_json(plan) | report.served_as_json(found), path=output, is_wanted=json_output
    )
    if not json_output:
        report.print_served(found)
    report.tell_doubts([found])
    if not found.figures.completed:
        raise typer.Exit(1)


@engine_command(TargetOptions, DatasetOptions, SamplingOptions, LoadOptions, FigureOptions)
def sweep(
    target: TargetOptions,
    dataset: DatasetOptions,
    sampling: SamplingOptions,
    options: LoadOptions,
    figures: FigureOptions,
    model: ServedModel = None,
    concurrencies: Annotated[
        str | None, typer.Option(metavar="INTEGER,...", help="Loads: most requests under way.")
    ] = None,
    request_rates: Annotated[
        str | None, typer.Option(metavar="NUMBER,...", help="Loads: requests per second.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for a picture of the sweep, .png. It needs toolkit-lm-bench[plot].",
        ),
    ] = None,
    json_output: AsJson = False,
    output: Output = None,
) -> None:
    """Measure a server under one load after another, each as `toolkit bench serve` does.

    The exit code is 1 when all requests fail.
    """
    from toolkit_lm_bench import report
    from toolkit_lm_bench.serve import SweepSetup
    from toolkit_lm_bench.sweep import make_loads, sweep as measure

    loads = make_loads(concurrencies, request_rates)
    report.check_output(output)
    if plot is not None:
        from toolkit_lm_bench.plot import check_plot

        check_plot(plot)
    plan = SweepSetup(target, dataset, sampling, options, figures, model)
    row = report.plan_as_json(plan)
    points = []
    for point in measure(plan, loads):
        points.append(point)
        typer.echo(
            f"{point.load.name}: {point.figures.output_throughput:.1f} output tokens/s", err=True
        )
        # Results so far are kept if a later load is interrupted.
        row["points"] = [report.served_as_json(point) for point in points]
        report.write_json(row, path=output, is_wanted=json_output and len(points) == len(loads))
    if not json_output:
        report.print_sweep(points)
    report.tell_doubts(points)
    if plot is not None:
        from toolkit_lm_bench.plot import plot as draw

        draw(points, plot)
    if not any(point.figures.completed for point in points):
        raise typer.Exit(1)


def _names(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"option {option!r}: {name!r} is not known. {nearest(name, known)}")
    return names
