"""Output of `toolkit plugins show` about a plugin's options."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from toolkit_lm_cli.plugins import option_fields


class StructOptions(msgspec.Struct):
    size: int
    """Bytes of one,
    padding included."""
    name: str = "x"


@dataclass
class DataOptions:
    size: int
    name: str = "x"


def test_options_have_the_text_below_them_as_help():
    assert option_fields(StructOptions) == {
        "size": "int. Bytes of one, padding included.",
        "name": "str = 'x'",
    }


def test_options_without_a_text_below_them():
    assert option_fields(DataOptions) == {"size": "int", "name": "str = 'x'"}
