"""`toolkit plugins api`: a contract as a plugin author reads it, a hook or a public class."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Annotated, Any

import toolkit_lm
import typer
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import PluginError, nearest
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands.options import engine_command

_PACKAGE = toolkit_lm.__name__


@engine_command(PluginsConfig)
def show_contract(
    name: Annotated[
        str,
        typer.Argument(help="Name of a hook, or of a public class such as StepPart."),
    ],
    config: PluginsConfig,
    plugins: Plugins,
) -> None:
    """Print a contract for plugin authors: signatures, types and docstrings of a hook or class.

    Members of torch's own classes are left out.
    """
    del config
    typer.echo(contract_text(name, plugins))


def contract_text(name: str, plugins: Plugins) -> str:
    """Python-like text of the hook or class `name`. Raises PluginError for an unknown name."""
    hooks = dict(hooks_of(plugins))
    if name in hooks:
        return _function_text(hooks[name])
    classes = dict(public_classes())
    short = name.rpartition(".")[2]
    if short not in classes:
        known = [*hooks, *classes]
        raise PluginError(f"no contract is called {name!r}. {nearest(name, known)}")
    module = classes[short]
    kind = getattr(importlib.import_module(module), short)
    return f"from {module} import {short}\n\n\n{class_text(kind)}"


def hooks_of(plugins: Plugins) -> Iterator[tuple[str, Any]]:
    """Name and specification of every hook: core's, and those that plugins add."""
    for name, caller in sorted(vars(plugins.hook).items()):
        if caller.spec is not None:
            yield name, caller.spec.function


def public_classes() -> Iterator[tuple[str, str]]:
    """Name of every public class of core, with the module that users import it from.

    Rooms come before single modules, and `toolkit_lm` itself comes last, so that each name keeps
    the face that a user sees first.
    """
    found: dict[str, str] = {}
    for module in (toolkit_lm, *_modules()):
        for name in _public(module):
            if inspect.isclass(getattr(module, name, None)):
                found.setdefault(name, module.__name__)
    yield from sorted(found.items())


def _modules() -> Iterator[ModuleType]:
    inner = sorted(pkgutil.iter_modules(toolkit_lm.__path__), key=lambda module: not module.ispkg)
    for module in inner:
        if module.name[0] != "_":
            yield importlib.import_module(f"{_PACKAGE}.{module.name}")


def _public(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", "") == module.__name__
    ]


def class_text(kind: type[Any]) -> str:
    """The class and what it inherits from classes of this project, as a stub with docstrings.

    Inherited members follow the class's own, under a comment that names their class.
    """
    seen: set[str] = set()
    parts = []
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] != _PACKAGE:
            continue
        definition = _definition(owner)
        if definition is None:
            continue
        members = [text for name, text in _members(definition) if name not in seen]
        seen |= {name for name, _ in _members(definition)}
        if owner is kind:
            bases = ", ".join(map(ast.unparse, (*definition.bases, *definition.keywords)))
            parts.append(f"class {kind.__name__}({bases}):" if bases else f"class {kind.__name__}:")
            parts += _docstring(definition)
        elif members:
            parts.append(f"    # Inherited from {owner.__name__}.")
        parts += members
    return "\n".join(parts)


def _definition(kind: type[Any]) -> ast.ClassDef | None:
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):
        return None
    return found if isinstance(found, ast.ClassDef) else None


def _members(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Name and text of each public member."""
    body = [*definition.body, ast.Pass()]
    for statement, following in pairwise(body):
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name[0] != "_" or name == "__init__":
                    yield name, textwrap.indent(_signature(statement), "    ")
            case ast.AnnAssign(target=ast.Name(id=name)) if name[0] != "_":
                yield name, textwrap.indent(_attribute(statement, following), "    ")
            case ast.Assign(targets=[ast.Name(id=name)]) if name[0] != "_":
                yield name, textwrap.indent(_attribute(statement, following), "    ")


def _attribute(statement: ast.stmt, following: ast.stmt) -> str:
    lines = [ast.unparse(statement)]
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        lines.append(_quoted(str(following.value.value)))
    return "\n".join(lines)


def _signature(statement: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Decorators, signature and docstring. A method without a docstring ends in `...`."""
    lines = [f"@{ast.unparse(decorator)}" for decorator in statement.decorator_list]
    prefix = "async def" if isinstance(statement, ast.AsyncFunctionDef) else "def"
    returns = "" if statement.returns is None else f" -> {ast.unparse(statement.returns)}"
    lines.append(f"{prefix} {statement.name}({ast.unparse(statement.args)}){returns}:")
    doc = ast.get_docstring(statement)
    lines.append(textwrap.indent(_quoted(doc) if doc else "...", "    "))
    return "\n".join(lines)


def _function_text(function: Any) -> str:
    (statement,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(statement, ast.FunctionDef)
    statement.decorator_list = []
    return _signature(statement)


def _docstring(definition: ast.ClassDef) -> list[str]:
    doc = ast.get_docstring(definition)
    return [textwrap.indent(_quoted(doc), "    ")] if doc else []


def _quoted(text: str) -> str:
    text = inspect.cleandoc(text)
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'
