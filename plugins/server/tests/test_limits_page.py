"""The table of limits in docs/security.md: no limit and no module is missing from it."""

from __future__ import annotations

import re
from pathlib import Path

import toolkit_lm_serving
from toolkit_lm.config import LimitsConfig, options_of
from toolkit_lm_server import limits
from toolkit_lm_server.options import ServerOptions

ROOT = Path(__file__).parents[3]
OWN = Path(limits.__file__).parent
TABLE = (ROOT / "docs" / "security.md").read_text().split("## Limits\n")[1].split("\n## ")[0]
ELSEWHERE = {"shutdown_timeout": "it bounds the operator's wait, not a client"}


def test_all_options_that_limit_clients_are_in_the_table():
    named = {*re.findall("`(--[a-z-]+)`", TABLE)}
    for section in (ServerOptions, LimitsConfig):
        for o in options_of(section):
            if o.name.startswith("max_") or o.name.endswith("_timeout"):
                assert (o.flag in named) is (o.name not in ELSEWHERE), o.name


def test_all_modules_of_limits_are_in_the_table_and_all_of_the_table_are_there():
    named = {*re.findall(r"`([a-z_/]+\.py)`", TABLE)}
    own = {file.name for file in OWN.glob("*.py")} - {"__init__.py"}
    assert own == {name for name in named if "/" not in name}
    assert all((ROOT / name).is_file() for name in named if "/" in name)
    serving = Path(toolkit_lm_serving.__file__).parent
    for name in ("cost", "budget", "fairness", "media_cost"):
        assert str((serving / f"{name}.py").relative_to(ROOT)) in named
