"""docs/clients.md is what the tests of clients write."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_page_of_clients_is_up_to_date():
    """Its generator writes it by hand, never a test: tests change no tracked file."""
    spec = importlib.util.spec_from_file_location(
        "clients_page", Path(__file__).parent / "clients" / "page.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page()
