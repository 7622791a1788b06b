"""Measurements: the commands `toolkit bench ...`."""

from toolkit_lm.plugin import hookimpl
from toolkit_lm_commands import CommandRegistry


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "bench startup",
        "toolkit_lm_bench.cli:startup",
        help="Measure the time from the start of a process to its first token.",
    )
    commands.add(
        "bench throughput",
        "toolkit_lm_bench.cli:throughput",
        help="Measure the throughput of LLM: a dataset as one batch.",
    )
    commands.add(
        "bench latency",
        "toolkit_lm_bench.cli:latency",
        help="Measure how long LLM takes for one batch of random prompts.",
    )
    commands.add(
        "bench serve",
        "toolkit_lm_bench.cli:serve",
        help="Measure a server that speaks OpenAI's API.",
    )
    commands.add(
        "bench sweep",
        "toolkit_lm_bench.cli:sweep",
        help="Measure a server under one load after another.",
    )
