"""The options of engines as TypedDicts, for annotations.

Type checkers and editors read typed_options.pyi, beside this file, which says the same in so many
words. `python docs/generate_typed_options.py` writes it.
"""

from typing import TypedDict

from toolkit_lm.config.vllm import VllmConfig

APART = ("model", "plugins")
"""Those for which `LLM(...)` has parameters of its own."""
_TYPES = {one.name: one.type for one in VllmConfig.options()}
VllmOptions = TypedDict("VllmOptions", _TYPES, total=False)
LLMOptions = TypedDict(
    "LLMOptions", {name: _TYPES[name] for name in _TYPES.keys() - {*APART}}, total=False
)
