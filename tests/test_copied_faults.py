"""docs/copied_faults.md: whoever follows a peer has looked up what that peer's users report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "copied_faults.md"
PEER = r"(vLLM|transformers|OpenAI|llama\.cpp|SGLang|TGI|Ollama|Anthropic|sentence-transformers)"
FOLLOWS = re.compile(rf"\b([Aa]s|[Ll]ike|are) {PEER}\b")
NAMES_ONLY = (
    "plugins/vllm_names/",
    "plugins/vendor_apis/",
    "plugins/devkit/",
    "contrib_models/transformers/",
)
"""Distributions that have a peer's names and shapes, or run the peer itself."""
SHAPES = {
    "core": "config/vllm.py renderer/answer.py",
    "models": "toolkit_lm_audio/rules.py toolkit_lm_decoder/glm.py toolkit_lm_encdec/rules.py "
    "toolkit_lm_vision/qwen2_vl.py toolkit_lm_vision/qwen2_vl_rules.py "
    "toolkit_lm_whisper/formats.py toolkit_lm_whisper/timestamps.py",
    "plugins": (
        "toolkit_lm_batches/records.py toolkit_lm_lora/__init__.py toolkit_lm_rl/extension.py "
        "toolkit_lm_model_pool/durations.py toolkit_lm_model_pool/listing.py "
        "toolkit_lm_model_pool/schemas.py toolkit_lm_structured_output/params.py "
        "toolkit_lm_sentence_transformers/late_interaction.py "
        "toolkit_lm_transcription/routes.py"
    ),
    "renderers": (
        "audio_processor.py chat_template.py forms.py glm_sampling.py joining.py sampling.py "
        "tokens.py video_kinds.py video_processor.py"
    ),
    "server": (
        "answer_reading.py app.py chat.py errors.py infill.py pages.py pooled.py protocol.py "
        "responses/__init__.py responses/conversation_store.py route.py tokens.py"
    ),
}
"""Files that take a peer's names or shapes of answers, or are compared with transformers in tests
of their own."""


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def sources() -> list[Path]:
    found = [
        path
        for place in ("core", "libs/*", "plugins/*", "contrib_*/*")
        for path in ROOT.glob(f"{place}/src/**/*.py")
    ]
    return [path for path in found if not path.relative_to(ROOT).as_posix().startswith(NAMES_ONLY)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_code_and_a_test_that_are_there(row):
    code, _, reported, _, shown = row
    name = code.strip("`")
    assert any(path.as_posix().endswith(f"/{name}") for path in sources()), f"{name} is nowhere"
    assert re.search(r"[\w.-]+#\d+|none found", reported), "where it is reported"
    assert (ROOT / shown.strip("`")).is_file()


def test_who_follows_a_peer_is_listed():
    listed = [row[0].strip("`") for row in rows()] + [
        name for names in SHAPES.values() for name in names.split()
    ]
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if FOLLOWS.search(path.read_text())
        and not any(path.as_posix().endswith(f"/{name}") for name in listed)
    ]
    assert not missing, (
        "look up what users of that peer report, and add a row to docs/copied_faults.md"
    )
