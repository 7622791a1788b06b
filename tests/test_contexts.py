"""What is found without being handed over, by thread or by context: each has its reason."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "core/src/toolkit_lm/attention/context.py": "ForwardContext: a model's forward carries no data "
    "of the engine's through its layers",
    "core/src/toolkit_lm/model/kernels.py": "construction: constructors hand nothing on, from "
    "layer to layer",
    "core/src/toolkit_lm/distributed/groups.py": "ops of compiled graphs can hold no group, "
    "ranks may be threads, and an executor connects them anew after a step that failed",
    "core/src/toolkit_lm/processing/pinned_rendering.py": "renderers look up what the engine holds "
    "in the middle of their own calls",
    "core/src/toolkit_lm/renderer/feature_lookup.py": "whose names of media hold: renderers' own "
    "calls lie between the server that knows the key and the lookup",
    "contrib_backends/cpu/src/toolkit_lm_cpu/library.py": "the thread count of a step's kernels",
    "plugins/server/src/toolkit_lm_server/caller.py": "who sends a request, for its log lines",
    "plugins/renderer_hf/src/toolkit_lm_renderer_hf/bounded.py": "Jinja calls filters without "
    "anything of the rendering's",
    "plugins/cli/src/toolkit_lm_cli/early.py": "the engine's process is started before the command "
    "line is read",
}
"""By file: what stands there, and why. docs/decisions/contexts.md says more of core's."""
MAKERS = {"local", "ContextVar"}


def _contexts(source: str) -> int:
    """Calls of threading.local and ContextVar, however they were imported."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [one.attr if isinstance(one, ast.Attribute) else one for one in calls]
    return sum((one.id if isinstance(one, ast.Name) else one) in MAKERS for one in names)


def test_each_thread_local_and_context_variable_has_a_reason():
    found = {
        str(path.relative_to(ROOT)): count
        for room in ("core", "libs", "plugins", "contrib_models", "contrib_backends")
        for path in (ROOT / room).rglob("src/**/*.py")
        if (count := _contexts(path.read_text()))
    }
    assert found == dict.fromkeys(ALLOWED, 1)


def test_one_is_found_however_it_is_made():
    assert _contexts("import threading as t\na = t.local()") == 1
    assert _contexts("from threading import local\na = local()") == 1
    assert _contexts("from contextvars import ContextVar as C\na: C = ContextVar('a')") == 1
