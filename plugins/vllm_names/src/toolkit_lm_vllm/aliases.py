"""`import vllm` by another name: the modules of toolkit_lm_vllm are those of vllm, too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from toolkit_lm_vllm_names.absent import use

_OURS = "toolkit_lm_vllm"
_THEIRS = "vllm"


class _Alias(Loader):
    """Loader of `vllm.path`, which is the module `toolkit_lm_vllm.path` itself."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_OURS + spec.name.removeprefix(_THEIRS))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The machinery has set it to the alias's.
        module.__spec__ = self._spec


class _Aliases(MetaPathFinder):
    """Finder of `vllm` and the modules below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _THEIRS and not fullname.startswith(f"{_THEIRS}."):
            return None
        return ModuleSpec(fullname, _Alias(), is_package=True)


class _Missing(MetaPathFinder):
    """Finder that comes last: says what to use for a module of vLLM's that is not here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raises ModuleNotFoundError."""
        if fullname.startswith(f"{_OURS}."):
            inner = fullname.removeprefix(f"{_OURS}.")
            raise ModuleNotFoundError(
                f"vLLM's module {f'{_THEIRS}.{inner}'!r} is not here: {use(inner)}.", name=fullname
            )


def add_finder() -> None:
    """Has modules that are not here say what to use. Safe to call twice."""
    if not any(isinstance(finder, _Missing) for finder in sys.meta_path):
        sys.meta_path.append(_Missing())


def install() -> None:
    """Has `import vllm` mean toolkit_lm_vllm in this process, also where vLLM is installed. Safe to
    call twice.

    Raises ImportError if vLLM itself was imported before.
    """
    known = sys.modules.get(_THEIRS)
    if known is not None and known is not sys.modules.get(_OURS):
        raise ImportError(
            f"{_THEIRS!r} was imported from {getattr(known, '__file__', None)!r}: call "
            f"{_OURS}.install() before."
        )
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())
