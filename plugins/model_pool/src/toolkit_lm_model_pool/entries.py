"""The models of a pool, as operators list them: a YAML file, a folder, or words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from toolkit_lm.errors import ConfigError, in_plain_words, nearest

from toolkit_lm_model_pool.durations import parse_seconds

Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[!-~]+$")]
"""A name of a model. It is printable ASCII without spaces, so that it fits in a URL and a log."""
_ADAPTER_NAME = re.compile(r"[!-<>-~]{1,256}")
"""A name of an adapter: as a model's, without `=`."""
_MOST_FILE = 2**20
"""Most bytes of a file of models."""


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models that share rules of loading, as llama-swap has them. A sleeping model counts as one
    that is not loaded."""

    members: Annotated[list[Name], Meta(min_length=1)]
    """Names of the models. A model is in one group at most."""
    swap: bool = True
    """One of them is loaded at a time."""
    exclusive: bool = True
    """To load one of them, models of other groups and of none are unloaded."""
    persistent: bool = False
    """Models that are not of the group unload none of its members."""


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a pool."""

    name: Name
    """Name in requests and answers."""
    checkpoint: Annotated[str, Meta(min_length=1)] | None = None
    """MODEL as `toolkit serve` takes it. None: the name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the engine, by name, in place of those of the command line."""
    aliases: list[Name] = field(default_factory=list)
    """Further names of the model."""
    adapters: dict[str, Annotated[str, Meta(min_length=1)]] = field(default_factory=dict)
    """Folders of LoRA adapters by name. Each is a model of its own in requests and lists."""
    keep_alive: str | int | float | None = None
    """Seconds, or a text such as "5m", after which the idle model is unloaded. Negative: it stays.
    None: the option `models_keep_alive`."""
    idle: str = "unload"
    """"unload" or "sleep": fate of the model when its time is over, or another needs its place.
    Asleep, its process stays, and it is unloaded only where more memory is needed."""
    sleep_level: Annotated[int, Meta(ge=1, le=2)] = 2
    """What the sleeping model gives up: the KV cache (1), or the weights, too (2)."""
    pin: bool = False
    """The model is loaded at the start, and never unloaded."""
    warm: bool = False
    """The model is loaded at the start."""
    optional: bool = False
    """The server starts without the model where it does not fit into the memory."""
    group: Group | None = None
    """The group that lists the model. An entry does not state it."""

    def __post_init__(self) -> None:
        if self.keep_alive is not None:
            parse_seconds(self.keep_alive)
        for name in self.adapters:
            if not _ADAPTER_NAME.fullmatch(name):
                raise ValueError(
                    f"{name[:256]!r} cannot be the name of an adapter: use printable ASCII without "
                    "spaces and '=', 256 characters at most."
                )
        if self.idle not in ("unload", "sleep"):
            raise ValueError(f"idle must be 'unload' or 'sleep', not {self.idle!r}.")
        if self.pin and self.idle == "sleep":
            raise ValueError("a model with pin stays loaded: it cannot have idle: sleep.")

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests find the model."""
        return (self.name, *self.aliases, *self.adapters)


class _File(Struct, forbid_unknown_fields=True):
    models: Annotated[list[Any], Meta(min_length=1)]
    groups: dict[str, Any] = {}


_OF_ENTRIES = tuple(name for name in Entry.__struct_fields__ if name != "group")
"""Fields that an entry may state."""


class _Source:
    """A YAML file and the places of its parts."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that is not YAML."""
        import yaml

        self.path = path
        try:
            if Path(path).stat().st_size > _MOST_FILE:
                raise ConfigError(f"models: {path!r} is larger than {_MOST_FILE} bytes.")
            text = Path(path).read_text(encoding="utf-8")
            self.data = yaml.safe_load(text)
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"models: {path!r} cannot be read: {error}") from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
            why = error.problem or error.context
            raise ConfigError(f"models: {path}{where}: this is not YAML: {why}.") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"models: {path}: this is not YAML: {error}") from error

    def place(self, *parts: str | int) -> str:
        """FILE:LINE:COLUMN of the value at these keys and indices, or of the nearest around it."""
        node = self._root
        for part in parts:
            found = _child(node, part)
            if found is None:
                break
            node = found
        mark = None if node is None else node.start_mark
        return self.path if mark is None else f"{self.path}:{mark.line + 1}:{mark.column + 1}"


def _child(node: Any, part: str | int) -> Any:
    """The node at a key or index of a YAML node. None where there is none."""
    values = getattr(node, "value", None)
    if not isinstance(values, list):
        return None
    if isinstance(part, int):
        return values[part] if part < len(values) and not isinstance(values[0], tuple) else None
    pairs = (pair for pair in values if isinstance(pair, tuple))
    return next((value for key, value in pairs if getattr(key, "value", None) == part), None)


def read_entries(path: str) -> list[Entry]:
    """The entries of a YAML file. Raises ConfigError, with line and column."""
    source = _Source(path)
    try:
        file = msgspec.convert(source.data, _File)
    except msgspec.ValidationError as error:
        wrong = in_plain_words(error, "the file ", source.data)
        raise ConfigError(
            f"models: {source.place()}: {wrong} It holds a list of entries, `models`, and may "
            "hold `groups` by name."
        ) from error
    entries = [_entry(source, number, data) for number, data in enumerate(file.models)]
    check_names(entries, [source.place("models", number) for number in range(len(entries))])
    return _grouped(source, entries, file.groups)


def _grouped(source: _Source, entries: list[Entry], listed: dict[str, Any]) -> list[Entry]:
    """The entries with their groups. Raises ConfigError."""
    of: dict[str, tuple[str, Group]] = {}
    known = {entry.name: entry for entry in entries}
    for name, data in listed.items():
        group = _group(source, name, data)
        for number, member in enumerate(group.members):
            where = source.place("groups", name, "members", number)
            if member not in known:
                raise ConfigError(
                    f"models: {where}: no entry has the name {member!r}. {nearest(member, known)}"
                )
            if member in of:
                raise ConfigError(
                    f"models: {where}: {member!r} is in the group {of[member][0]!r}, too. A model "
                    "is in one group at most."
                )
            of[member] = name, group
            if group.swap and known[member].pin and len(group.members) > 1:
                raise ConfigError(
                    f"models: {where}: {member!r} has pin and stays loaded, so that no other "
                    f"member of {name!r} could be. Give the group swap: false."
                )
    return [
        msgspec.structs.replace(entry, group=of[entry.name][1]) if entry.name in of else entry
        for entry in entries
    ]


def _group(source: _Source, name: str, data: Any) -> Group:
    where = source.place("groups", name)
    if isinstance(data, dict):
        for field_name in data:
            if field_name not in Group.__struct_fields__:
                raise ConfigError(
                    f"models: {where}: unknown field {str(field_name)!r} of the group {name!r}. "
                    f"{nearest(str(field_name), Group.__struct_fields__)}"
                )
    try:
        return msgspec.convert(data, Group)
    except msgspec.ValidationError as error:
        wrong = in_plain_words(error, f"the group {name!r} ", data)
        raise ConfigError(f"models: {where}: {wrong}") from error


def _entry(source: _Source, number: int, data: Any) -> Entry:
    if isinstance(data, dict):
        for name in data:
            if name not in _OF_ENTRIES:
                raise ConfigError(
                    f"models: {source.place('models', number, str(name))}: unknown field "
                    f"{str(name)!r}. {nearest(str(name), _OF_ENTRIES)}"
                )
    try:
        return msgspec.convert(data, Entry)
    except msgspec.ValidationError as error:
        parts = [
            int(part[1:-1]) if part.startswith("[") else part[1:]
            for part in re.findall(r"\[\d+\]|\.\w+", str(error).rpartition(" - at `$")[2])
        ]
        where = source.place("models", number, *parts)
        wrong = in_plain_words(error, "the entry ", data)
        raise ConfigError(f"models: {where}: {wrong}") from error


def read_folder(path: str) -> list[Entry]:
    """An entry for each subfolder with a config.json, in the order of names. Raises ConfigError."""
    try:
        found = sorted(folder for folder in Path(path).iterdir() if _is_checkpoint(folder))
    except OSError as error:
        raise ConfigError(f"models_dir: {path!r} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"models_dir: no folder in {path!r} has a config.json.")
    return [made_entry(folder.name, str(folder)) for folder in found]


def _is_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and (folder / "config.json").is_file()


def made_entry(name: str, checkpoint: str | None = None) -> Entry:
    """An entry that no file describes. Raises ConfigError for a name that none can have."""
    try:
        return msgspec.convert({"name": name, "checkpoint": checkpoint}, Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name!r} cannot be the name of a model: use printable ASCII without spaces."
        ) from error


def check_names(entries: Sequence[Entry], places: Sequence[str]) -> None:
    """Raises ConfigError where two entries have one name. `places`: where each entry stands."""
    taken: dict[str, int] = {}
    for number, name in _names(entries):
        if name in taken:
            first = taken[name]
            where = (
                f"{places[number]}: twice"
                if first == number
                else f"{places[first]} and {places[number]}"
            )
            raise ConfigError(f"models: two models cannot have the name {name!r}: {where}.")
        taken[name] = number


def _names(entries: Sequence[Entry]) -> Iterator[tuple[int, str]]:
    return ((number, name) for number, entry in enumerate(entries) for name in entry.names)
