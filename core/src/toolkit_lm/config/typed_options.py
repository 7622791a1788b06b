"""The options of engines as TypedDicts, for annotations.

Type checkers and editors read typed_options.pyi, in this folder, which states the same field by
field. `python docs/generate_typed_options.py` writes it.
"""

from typing import TypedDict

from toolkit_lm.config.vllm import VllmConfig

APART = ("model", "plugins")
"""Options for which `LLM(...)` has parameters of its own."""
_TYPES = {option.name: option.type for option in VllmConfig.options()}
VllmOptions = TypedDict("VllmOptions", _TYPES, total=False)
LLMOptions = TypedDict(
    "LLMOptions", {name: _TYPES[name] for name in _TYPES.keys() - {*APART}}, total=False
)
