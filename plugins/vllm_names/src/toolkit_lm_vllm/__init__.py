"""vLLM's modules and names, of toolkit-lm: replace `vllm` by `toolkit_lm_vllm` in a script, or have
`import vllm` mean this package:

    import toolkit_lm_vllm

    toolkit_lm_vllm.install()
    from vllm import LLM, SamplingParams

A name or module that is not here raises ImportError, which says what to use. Importing this package
imports no torch.
"""

import lazy_loader
from toolkit_lm_vllm_names.absent import absent

from .aliases import add_finder
from .version import __version__

# The names, and the modules that define them, stand in __init__.pyi.
_own, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
_missing = absent(__name__)
__version_tuple__ = tuple(__version__.split("."))
add_finder()


def __getattr__(name: str) -> object:
    """Names are imported on first use."""
    return _own(name) if name in __all__ else _missing(name)
