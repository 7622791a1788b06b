"""xgrammar passes the conformance kit."""

from __future__ import annotations

from toolkit_lm_devkit import StructuredOutputConformance
from toolkit_lm_xgrammar.reader import XGrammarReader


class TestXGrammar(StructuredOutputConformance):
    backend = "xgrammar"
    reader = XGrammarReader
    asked = {
        "grammar": ({"grammar": 'root ::= ("ab" | "cd"){2,3}'}, "(ab|cd){2,3}"),
        "tag": (
            {"structural_tag": {"format": {"type": "const_string", "value": "here it is"}}},
            "here it is",
        ),
    }
