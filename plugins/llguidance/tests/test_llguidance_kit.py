"""llguidance passes the conformance kit."""

from __future__ import annotations

from toolkit_lm_devkit import StructuredOutputConformance
from toolkit_lm_llguidance.backend import LLGuidanceReader


class TestLLGuidance(StructuredOutputConformance):
    backend = "llguidance"
    reader = LLGuidanceReader
    asked = {
        "Lark": ({"grammar": 'start: ("ab" | "cd")~2..3'}, "(ab|cd){2,3}"),
        "GBNF": ({"grammar": 'root ::= ("ab" | "cd"){2,3}'}, "(ab|cd){2,3}"),
        "tag": (
            {"structural_tag": {"format": {"type": "const_string", "value": "here it is"}}},
            "here it is",
        ),
    }
