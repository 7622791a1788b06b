"""EngineArgs: the options of an engine in vLLM's names, as scripts take them from their command
lines."""

from __future__ import annotations

import argparse
import os
from typing import Any, Self

from toolkit_lm.config import Option, VllmConfig, load_options
from toolkit_lm.errors import ConfigError, nearest

from toolkit_lm_vllm_names.name import Name
from toolkit_lm_vllm_names.table import SHORT_FLAGS, TABLE, engine_options, names
from toolkit_lm_vllm_names.values import parsed


class EngineArgs:
    """Options of an engine, by vLLM's names or ours. What is not given is None.

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    llm = LLM(**vars(parser.parse_args()))
    engine = LLMEngine.from_engine_args(EngineArgs(model="tiny", gpu_memory_utilization=0.5))
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Raises ConfigError for an unknown name."""
        known = _known()
        vars(self).update(dict.fromkeys(known))
        for name, value in {"model": model, **options}.items():
            if name not in known:
                raise ConfigError(f"unknown option {name!r}. {nearest(name, known)}")
            setattr(self, name, value)

    def create_engine_config(self, usage_context: object = None) -> VllmConfig:
        """The config; TOOLKIT_LM_* variables give what is not given. Raises ConfigError."""
        stated = {name: value for name, value in vars(self).items() if value is not None}
        return VllmConfig.make(
            **load_options(VllmConfig.options(), engine_options(stated), environ=os.environ)
        )

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, async_args_only: bool = False
    ) -> argparse.ArgumentParser:
        """Adds a flag for each option of vLLM's engine, and returns `parser`. One that is not given
        is None."""
        if not async_args_only:
            short = {name: flag for flag, name in SHORT_FLAGS.items()}
            ours = {o.name: o for o in VllmConfig.options()}
            group = parser.add_argument_group("engine")
            for row in names(TABLE.values(), of_server=False):
                flags = [row.flag, *([short[row.name]] if row.name in short else [])]
                if row.is_switch:
                    group.add_argument(
                        *flags, action=argparse.BooleanOptionalAction, default=None, help=_help(row)
                    )
                else:
                    number = "+" if row.name == "served_model_name" else None
                    group.add_argument(
                        *flags,
                        type=_type(ours.get(row.name)),
                        nargs=number,
                        default=None,
                        help=_help(row),
                    )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Options of an engine among parsed arguments."""
        known = _known()
        return cls(**{name: value for name, value in vars(args).items() if name in known})


class AsyncEngineArgs(EngineArgs):
    """EngineArgs for AsyncLLM."""


def _known() -> list[str]:
    return list(
        dict.fromkeys(
            [
                *(o.name for o in VllmConfig.options()),
                *(row.name for row in names(TABLE.values(), of_server=False)),
            ]
        )
    )


def _type(ours: Option | None) -> Any:
    """A text stays as it is where our option is one."""
    return str if ours is not None and str in ours.kinds else parsed


def _help(row: Name) -> str:
    text = {
        "same": "As here.",
        "renamed": f"Here: {row.ours}.",
        "free": "Not needed:",
        "refused": "Not supported.",
    }[row.kind]
    return f"{text} {row.note}".strip().replace("%", "%%")
