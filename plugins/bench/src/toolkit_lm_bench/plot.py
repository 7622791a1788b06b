"""A picture of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit_lm.errors import ConfigError

from toolkit_lm_bench.serve import Served

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (11.0, 8.0)


def check_plot(path: Path) -> None:
    """Raises ConfigError for a file of another kind, and where matplotlib is missing."""
    if path.suffix != ".png":
        raise ConfigError(f"option 'plot': {str(path)!r} must end in .png.")
    if not path.parent.is_dir():
        raise ConfigError(f"option 'plot': there is no folder {str(path.parent)!r}.")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "option 'plot': pictures need matplotlib: pip install 'toolkit-lm-bench[plot]'."
        )


def plot(points: Sequence[Served], path: Path) -> None:
    """Writes a PNG: throughput, TTFT and TPOT over the load, and throughput over TPOT. Loads of
    which all requests failed are left out."""
    from matplotlib.figure import Figure

    points = [point for point in points if point.figures.completed]
    figure = Figure(figsize=_INCHES, layout="constrained")
    (throughput, ttft), (tpot, trade) = figure.subplots(2, 2)
    by_rate = all(point.load.concurrency is None for point in points)
    names = [
        f"{point.load.request_rate:g}" if by_rate else str(point.load.concurrency)
        for point in points
    ]
    over = {"xlabel": "requests per second, as sent" if by_rate else "concurrency"}
    throughput.plot(names, [point.figures.output_throughput for point in points], marker="o")
    throughput.set(title="throughput", ylabel="output tokens per second", ylim=(0, None), **over)
    _plot_percentiles(ttft, names, points, "ttft")
    ttft.set(title="time to first token", ylabel="ms", ylim=(0, None), **over)
    _plot_percentiles(tpot, names, points, "tpot")
    tpot.set(title="time per output token", ylabel="ms", ylim=(0, None), **over)
    _plot_trade(trade, names, points)
    for axes in (throughput, ttft, tpot, trade):
        axes.grid(alpha=0.3)
    figure.suptitle(points[0].model if points else "no request was answered")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"option 'plot': {str(path)!r} cannot be written: {error}") from error


def _plot_percentiles(axes: Axes, names: list[str], points: Sequence[Served], metric: str) -> None:
    """A line for each percentile."""
    have = [
        (name, point.figures.distributions[metric])
        for name, point in zip(names, points, strict=True)
        if metric in point.figures.distributions
    ]
    for number in have[0][1].percentiles if have else ():
        axes.plot(
            [name for name, _ in have],
            [point.percentiles[number] for _, point in have],
            marker="o",
            label=f"p{number:g}",
        )
    if have:
        axes.legend()


def _plot_trade(axes: Axes, names: list[str], points: Sequence[Served]) -> None:
    """Plot the cost of throughput for each user."""
    have = [
        (name, point.figures)
        for name, point in zip(names, points, strict=True)
        if "tpot" in point.figures.distributions
    ]
    x = [figures.distributions["tpot"].mean for _, figures in have]
    y = [figures.output_throughput for _, figures in have]
    axes.plot(x, y, marker="o")
    for (name, _), place in zip(have, zip(x, y, strict=True), strict=True):
        axes.annotate(name, place, textcoords="offset points", xytext=(5, 5))
    axes.set(
        title="throughput against latency",
        xlabel="mean time per output token, ms",
        ylabel="output tokens per second",
    )
    axes.set(xlim=(0, None), ylim=(0, None))
