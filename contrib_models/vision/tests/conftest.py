"""Leaves most ways of computing the newer families to the night."""

import pytest

DAILY = ("[qwen3_vl-chunked]", "[qwen3_5-chunked]", "preempted", "alike_in_all_but", "one_call")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            item.path.name == "test_qwen2_vl_engine.py"
            and "[qwen3" in item.nodeid
            and not any(name in item.nodeid for name in DAILY)
        ):
            item.add_marker("nightly")
