"""Leaves most ways of computing the newer families to the night."""

import pytest

ALIKE = ("[smolvlm", "[pixtral")
"""Families of one code each with another."""
DAILY = ("[qwen3_vl-chunked]", "[qwen3_5-chunked]", "preempted", "alike_in_all_but", "one_call")

SLOW = (
    "in_a_process",
    "ends_inside_an_item[large",
    "ends_inside_an_item[next",
    "small blocks]",
    "and uncached]",
)
"""Tests of the kit that a family with the same rules has by day."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            item.path.name == "test_qwen2_vl_engine.py"
            and "[qwen3" in item.nodeid
            and not any(name in item.nodeid for name in DAILY)
        ):
            item.add_marker("nightly")
        if (
            item.path.name == "test_tiled_engine.py"
            and any(name in item.nodeid for name in ALIKE)
            and "TestTiled" in item.nodeid
            and "-chunked]" not in item.nodeid
        ):
            item.add_marker("nightly")
        is_new = item.path.name in ("test_gemma4_vision.py", "test_anyres.py")
        if is_new and any(name in item.nodeid for name in SLOW):
            item.add_marker("nightly")
