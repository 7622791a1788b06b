"""Writes the tables of options in docs/configuration.md, of parameters in docs/sampling.md and of
models in docs/models.md, from where these are stated.

usage: python docs/generate_options.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

from msgspec import Struct
from toolkit_lm.config import Option, PluginsConfig, VllmConfig, options_of
from toolkit_lm.param_spec import spec_of
from toolkit_lm.params import SAMPLING_PARAMS
from toolkit_lm.plugin import ModelEntry, ModelRegistry, Plugins
from toolkit_lm.resolution.twice import TWICE
from toolkit_lm_cli.converse import ClientOptions
from toolkit_lm_fronts.cli import EngineOptions
from toolkit_lm_model_pool.options import PoolOptions
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_server.batch.command import BatchOptions
from toolkit_lm_server.options import ServerOptions

DOCS = Path(__file__).parent
PLUGINS = ("structured_output", "parsers", "sampling_extra", "drafters", "router")
"""Plugins that bring sampling parameters."""
_MEDIA = {"audio": "recordings"}
"""Names of a model's inputs that are not the plural of a modality's name."""
BEGIN = "<!-- written by docs/generate_options.py -->\n"
END = "<!-- end of what is written -->\n"


def main() -> None:
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """Each page with its tables as they should be."""
    written = {
        DOCS / "configuration.md": tables(),
        DOCS / "sampling.md": sampling_table(),
        DOCS / "models.md": model_tables(),
    }
    return {
        page: with_tables(page.read_text(encoding="utf-8"), text) for page, text in written.items()
    }


def with_tables(page: str, text: str) -> str:
    """The page with `text` between the two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + text + END + after


def tables() -> str:
    """One table for each section of options."""
    sections = [
        kind
        for kind in get_type_hints(VllmConfig).values()
        if isinstance(kind, type) and options_of(kind)
    ]
    commands = [
        ("`toolkit serve`", ServerOptions),
        ("`toolkit route`", RouterOptions),
        ("`toolkit engine`", EngineOptions),
        ("`toolkit serve` of several models", PoolOptions),
        ("`toolkit chat` and `toolkit complete`", ClientOptions),
        ("`toolkit run-batch`", BatchOptions),
    ]
    titled = [(section.__name__.removesuffix("Config"), section) for section in sections] + commands
    return "".join(table(title, section) for title, section in titled) + "\n"


def table(title: str, section: type[Struct]) -> str:
    """A section's heading, its sentence and its options."""
    rows = "".join(
        f"| `{o.name}` | {values(o)} | {default(o)} | {escape(o.help)} |\n"
        for o in options_of(section)
    )
    sentence = " ".join((section.__doc__ or "").split())
    return (
        f"\n### {title}\n\n{sentence}\n\n| option | values | default | meaning |\n| --- | "
        f"--- | --- | --- |\n{rows}"
    )


def sampling_table() -> str:
    """The tables of sampling parameters: core's, then those of plugins."""
    return params_table(SAMPLING_PARAMS.values()) + "".join(map(plugin_table, PLUGINS))


def model_tables() -> str:
    """Architectures and what they do, by plugin, as the registry has them."""
    files = sorted((DOCS.parent / "contrib_models").glob("*/pyproject.toml"))
    names = [
        file.parent.name
        for file in files
        if "[project.entry-points.toolkit_lm]" in file.read_text(encoding="utf-8")
    ]
    models = Plugins.load(PluginsConfig(plugins=names)).models
    made = ""
    for owner, entries in groupby(models.entries(), key=lambda entry: entry.owner):
        rows = "".join(model_row(models, entry) for entry in entries if not entry.is_fallback)
        if rows:
            made += (
                f"\n### {owner.distribution}\n\n| architecture | does | takes |\n| --- | --- | "
                f"--- |\n{rows}"
            )
    return made + coverage_tables() + twice_table() + "\n"


def coverage_tables() -> str:
    """Tables of transformers' classes, from the results of benchmarks/coverage.py."""
    path = DOCS.parent / "benchmarks" / "coverage.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    by_mapping: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for key, (result, reason) in stored["classes"].items():
        mapping, model_type, name = key.split("/")
        found = by_mapping.setdefault(mapping, {}).setdefault(result, [])
        found.append((f"`{name}`" + (f" ({model_type})" if result == "unbuilt" else ""), reason))
    kinds = ("native", "fallback", "refused", "differs", "fails", "hangs", "unbuilt")
    counts = "".join(
        f"| {mapping} | {' | '.join(str(len(found.get(kind, ()))) for kind in kinds)} |\n"
        for mapping, found in by_mapping.items()
    )
    made = (
        f"\n### Classes of transformers {stored['transformers']}\n\n"
        "`benchmarks/coverage.py` makes a tiny random checkpoint of each class and compares the "
        "engine's results with those of transformers, in float32. A class is named once for each "
        "`model_type`. Unbuilt are those of which the benchmark can make no tiny checkpoint.\n\n"
        f"| mapping | {' | '.join(kinds)} |\n|{' --- |' * (len(kinds) + 1)}\n{counts}"
    )
    for mapping, found in by_mapping.items():
        names = sorted({name for name, _ in found.get("fallback", ())})
        if names:
            made += f"\n{mapping.capitalize()}, by the fallback: {', '.join(names)}.\n"
        rows = "".join(
            f"| {name} | {kind} | {escape(reason)} |\n"
            for kind in kinds[2:]
            for name, reason in found.get(kind, ())
        )
        if rows:
            made += f"\n| {mapping} | | reason |\n| --- | --- | --- |\n{rows}"
    return made


def twice_table() -> str:
    """Table of the settings that checkpoints state twice, and the one that wins."""
    rows = "".join(f"| {rule.subject} | {rule.places} | {rule.wins} |\n" for rule in TWICE)
    told = (
        "A contradiction is resolved as the table says. A log line reports it where the table has "
        "the word logged. Equal values are not reported."
    )
    return (
        f"\n### What checkpoints say twice\n\n{told}\n\n| what | is said by | what wins |\n| --- "
        f"| --- | --- |\n{rows}\n"
        "If config.json names no `architectures`, its `model_type` decides, provided that one "
        "class is registered for it, or that a fallback knows one.\n"
    )


def model_row(models: ModelRegistry, entry: ModelEntry) -> str:
    """Row of an architecture: its tasks and its inputs."""
    media = () if entry.multimodal is None else models.load_multimodal(entry.key).modalities
    takes = [
        "text",
        *(_MEDIA.get(kind, f"{kind}s") for kind in media),
        *(["a prompt of its encoder"] if entry.encoder_decoder else []),
    ]
    does = "pools" if entry.runner == "pooling" else "generates"
    if does == "generates" and not media and not entry.encoder_decoder:
        does += ", also pools"
    return f"| `{entry.key}` | {does} | {', '.join(takes)} |\n"


def plugin_table(plugin: str) -> str:
    """The sampling parameters that a plugin brings."""
    registry = Plugins.load(PluginsConfig(plugins=[plugin])).logits_processors
    return (
        f"Parameters of the plugin `{plugin}`, from toolkit-lm-{plugin.replace('_', '-')}:\n"
        f"{params_table(registry.params.values())}"
    )


def params_table(params: Iterable[Option]) -> str:
    """A heading, and one row for each parameter."""
    rows = ""
    for o in params:
        none = spec_of(o).none
        shown = f"`{o.default!r}`" + (f": {none}" if none and o.default is None else "")
        meaning = o.help + (f" `None`: {none}." if none and o.default is not None else "")
        rows += f"| `{o.name}` | {shown} | {param_values(o)} | {escape(meaning)} |\n"
    return f"\n| parameter | default | values | meaning |\n| --- | --- | --- | --- |\n{rows}\n"


def param_values(o: Option) -> str:
    """Allowed values of a sampling parameter."""
    spec = spec_of(o)
    most = f"up to {spec.max_items} " if spec.max_items else ""
    if o.is_mapping:
        key, _ = get_args(next(kind for kind in o.kinds if get_origin(kind) is dict))
        return (
            f"{most}token ids, each with a number {spec.range}"
            if key is int
            else f"{most}names, each with a value"
        )
    if o.is_list:
        (item,) = get_args(next(kind for kind in o.kinds if get_origin(kind) is list))
        words = " or ".join(
            word
            for kind, word in ((str, "texts"), (int, "token ids"))
            if kind in (item, *get_args(item))
        )
        one = "a text, or " if str in o.kinds else ""
        return f"{one}{most}{words}" + (
            f", of up to {spec.max_length} characters" if spec.max_length else ""
        )
    if bool in o.kinds:
        return ", ".join(
            ["switch", *(f'`"{choice}"`' for kind in o.kinds for choice in get_args(kind))]
        )
    return (
        "text" if str in o.kinds else ("number " if float in o.kinds else "integer ") + spec.range
    )


def values(o: Option) -> str:
    """Allowed values of an option."""
    if o.choices:
        return ", ".join(f"`{choice}`" for choice in o.choices)
    if o.is_mapping:
        return "NAME.KEY=VALUE, several times"
    if o.is_list:
        return "names"
    if o.is_flag:
        return "switch"
    kind = "number" if float in o.kinds else "text"
    if int in o.kinds:
        kind = "integer"
    return f"{kind} {o.spec.range}".strip()


def default(o: Option) -> str:
    """The default as a reader would write it, or what None stands for."""
    value = o.default
    if value in (None, "", [], {}):
        return o.spec.none
    shown = ("off", "on")[value] if isinstance(value, bool) else f"`{value}`"
    return f"{shown}; none: {o.spec.none}" if o.spec.none else shown


def escape(text: str) -> str:
    """`text` inside a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
