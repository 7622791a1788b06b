"""Trials of a chat template: marks stand in the place of texts, and what comes out shows what the
template writes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar

from toolkit_lm.errors import RequestError

from toolkit_lm_renderer_hf.forms import (
    TOOL_FORMS,
    Form,
    Plain,
    Sort,
    ToolForm,
    ToolSort,
    forms_of,
    sort_of,
    tool_sort_of,
    with_names,
    written,
    written_tool,
)

Tried = Callable[[list[Plain], list[Any] | None], str | None]
"""Renders messages and tools with a template; None if the template refuses them."""
Chosen = TypeVar("Chosen", Form, ToolForm)
_ID = "abcdefghi"
"""Id of a tool call. Some templates refuse ids that are not nine letters."""
_FILLER = "a text of no interest"
_SECRET = f"qz{secrets.token_hex(4)}q"
"""Begins each mark: a client that knew it could write marks itself, and have a template pass for
one that writes all."""
_MARK = re.compile(f"{_SECRET}([0-9]+)qz")
_WHOLE_TOOL = ToolSort("given", "given", has_required=True)
_SHAPES = 256
"""Shapes of conversations that are remembered."""
_LONGEST_SHAPE = 4096
"""Characters of one that is."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Whose forms are remembered. A role may be any text of a client's."""
_TOOL_SORTS = 256
"""Sets of sorts of tools whose form is remembered."""


def _mark(number: int) -> str:
    return f"{_SECRET}{number}qz"


def _marks(text: str) -> set[int]:
    """The marks in a text. A template may change the case of what it writes."""
    return {int(found) for found in _MARK.findall(text.casefold())}


class Faults(NamedTuple):
    """Total faults of several renderings of marks. Compared field by field: the lesser is
    better."""

    num_broken: int
    """Conversations that the template refuses, or leaves marks out of."""
    num_missing: int
    """Marks that are left out; where it refuses, all, and one more."""
    num_raw: int
    """Places where a list or a mapping is written as Python writes it, or a JSON text once more as
    JSON."""
    num_nones: int
    """How often it says None. A template may say so by itself."""


def _faults(texts: Sequence[str | None], marks: set[int]) -> Faults:
    """`texts`: of several conversations with the same marks; None: the template refuses one."""
    rendered = [text for text in texts if text is not None]
    missing = [len(marks - _marks(text)) if text is not None else len(marks) + 1 for text in texts]
    num_nones = sum(text.count("None") for text in rendered)
    return Faults(sum(map(bool, missing)), sum(missing), sum(map(_num_raw, rendered)), num_nones)


def _num_raw(text: str) -> int:
    close = re.sub(r"\s", "", text.casefold())
    parts = sum(close.count(f"{quote}type{quote}:{quote}text{quote}") for quote in "'\"")
    return parts + len(re.findall(rf"""'{_MARK.pattern}':|\\"{_MARK.pattern}\\":""", close))


def _best(forms: Sequence[Chosen], faults: Callable[[Chosen], Faults]) -> Chosen:
    """The first form without a fault, else the first of those with the least."""
    best = forms[0]
    least = None
    for form in forms:
        found = faults(form)
        if least is None or found < least:
            best = form
            least = found
        if not any(found):
            break
    return best


class Trials:
    """Finds the forms of messages and tools that one template writes in full. Several threads may
    share it.

    A form is found when the first message of its sort comes, and is remembered where the role is a
    usual one. `tried` must be called within a budget of time: see `bounded.rendering`.
    """

    def __init__(self, tried: Tried, source: str) -> None:
        self._tried = tried
        self._source = source
        self._forms: dict[Sort, Form] = {}
        self._tool_forms: dict[frozenset[ToolSort], ToolForm] = {}
        self._whole: set[Hashable] = set()
        """Shapes of conversations of which nothing is left out."""

    def messages(self, messages: Sequence[Plain]) -> tuple[list[Plain], list[int]]:
        """The messages, each in the form of its sort, and of which of `messages` each is."""
        made: list[Plain] = []
        origins: list[int] = []
        forms: dict[Sort, Form] = {}
        for index, message in enumerate(with_names(messages)):
            if (sort := sort_of(message)) not in forms:
                forms[sort] = self.form(sort)
            ours = written(message, forms[sort])
            made += ours
            origins += [index] * len(ours)
        return made, origins

    def tools(self, tools: list[Any] | None) -> list[Any] | None:
        """The tools, all in one form."""
        if not tools:
            return None if self._usual_tools else self._usual_tools
        sorts = frozenset(sort for tool in tools if (sort := tool_sort_of(tool)) is not None)
        if (form := self._tool_forms.get(sorts)) is None:
            form = self._find_tool_form(sorts)
            if len(self._tool_forms) >= _TOOL_SORTS:
                self._tool_forms.clear()
            self._tool_forms[sorts] = form
        return [written_tool(tool, form) for tool in tools]

    def writes_tools(self) -> bool:
        """Whether the name of a tool is written."""
        tool, _ = _tool_sample(_WHOLE_TOOL, 0)
        text = self._tried(self._filler("user"), self.tools([tool]))
        return text is not None and 0 in _marks(text)

    def form(self, sort: Sort) -> Form:
        """The first form that is written in full, else the one of which most is written."""
        if (form := self._forms.get(sort)) is None:
            form = self._find_form(sort)
            if sort.role in _ROLES:
                self._forms[sort] = form
        return form

    def check(
        self,
        messages: list[Plain],
        origins: Sequence[int],
        tools: list[Any] | None,
        tried: Tried,
        options: Any,
    ) -> bool:
        """Raises RequestError for what the template leaves out without a word: contents, tool
        calls, tools.

        `messages`, `origins`, `tools`: in their forms. `tried` renders with the `options` of the
        request. False: the template refuses marks in the place of texts, so that nothing is known.
        """
        shape = (tuple(map(_shape, messages)), _shape_of_tools(tools), repr(options))
        if shape in self._whole:
            return True
        marked = _Marked()
        conversation = [
            marked.message(message, index) for message, index in zip(messages, origins, strict=True)
        ]
        text = tried(conversation, [marked.tool(tool) for tool in tools] if tools else tools)
        if text is None:
            return False
        if missing := set(range(len(marked.places))) - _marks(text):
            raise _left_out(*marked.places[min(missing)])
        if len(self._whole) >= _SHAPES:
            self._whole.clear()
        if len(repr(shape)) < _LONGEST_SHAPE:
            self._whole.add(shape)
        return True

    def _find_form(self, sort: Sort) -> Form:
        candidates = list(forms_of(sort, self._source))
        if len(candidates) == 1:
            return candidates[0]
        message, marks = _sample(sort)

        def faults(form: Form) -> Faults:
            chats = self._around(sort, written(message, form))
            return _faults([self._tried(chat, self._usual_tools) for chat in chats], marks)

        return _best(candidates, faults)

    @cached_property
    def _usual_tools(self) -> list[Any] | None:
        """Tools for trial conversations: none, or some if the template takes no conversation
        without tools."""
        tool, _ = _tool_sample(_WHOLE_TOOL, 0)
        usual: list[list[Any] | None] = [None, [], [tool]]
        user = {"role": "user", "content": _FILLER}
        users = [written(user, Form("user")), written(user, Form("user", "parts"))]
        return next(
            (
                usual_turn
                for usual_turn in usual
                if any(self._tried(chat, usual_turn) is not None for chat in users)
            ),
            None,
        )

    def _around(self, sort: Sort, message: list[Plain]) -> list[list[Plain]]:
        """Conversations that such a message may stand in. Templates refuse some of them."""
        if sort.role == "user":
            return [message]
        user = self._filler("user")
        if sort.role == "assistant" and not sort.has_calls:
            return [[*user, *message, *user], [*user, *message]]
        if sort.role == "assistant":
            result = {"role": "tool", "tool_call_id": _ID, "name": _mark(0), "content": _FILLER}
            results = [written(result, form) for form in (Form("tool"), Form("tool", "parts"))]
            ends = [
                end
                for chat in results
                for end in ([*chat, *self._filler("assistant"), *user], chat)
            ]
            return [[*user, *message, *end] for end in (*ends, [])]
        if sort.role != "tool":
            return [[*message, *user], [*user, *message, *user]]
        call = {"role": "assistant", "tool_calls": [_call("a", {"a": "b"})]}
        begin = [*user, *written(call, self.form(sort_of(call))), *message]
        return [[*begin, *self._filler("assistant"), *user], begin]

    def _filler(self, role: str) -> list[Plain]:
        """A message of no interest."""
        return written({"role": role, "content": _FILLER}, self.form(Sort(role, "text", False)))

    def _find_tool_form(self, sorts: frozenset[ToolSort]) -> ToolForm:
        tools = []
        marks = set[int]()
        for sort in sorts:
            tool, more = _tool_sample(sort, len(marks))
            tools.append(tool)
            marks |= more
        user = self._filler("user")
        system = self._filler("system")

        def faults(form: ToolForm) -> Faults:
            written = [written_tool(tool, form) for tool in tools]
            return _faults([self._tried(chat, written) for chat in (user, [*system, *user])], marks)

        return _best(TOOL_FORMS, faults)


def _call(name: str, arguments: Any) -> Plain:
    return {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}


def _sample(sort: Sort) -> tuple[Plain, set[int]]:
    """A message of a sort, and the marks in it."""
    message: Plain = {"role": sort.role}
    marks = set[int]()
    match sort.content:
        case "text":
            message["content"] = _mark(3)
            marks = {3}
        case "parts":
            message["content"] = [{"type": "text", "text": _mark(number)} for number in (3, 4)]
            marks = {3, 4}
        case "empty":
            message["content"] = ""
    if sort.has_calls:
        message["tool_calls"] = [_call(_mark(0), {_mark(1): _mark(2)})]
        marks |= {0, 1, 2}
    if sort.role == "tool":
        message |= {"tool_call_id": _ID, "name": "a"}
    return message, marks


def _tool_sample(sort: ToolSort, first: int) -> tuple[Plain, set[int]]:
    """A tool of a sort, and the marks in it, which begin at `first`."""
    function: Plain = {"name": _mark(first)}
    marks = {first}
    for name, stated in (("description", sort.description), ("parameters", sort.parameters)):
        if stated == "null":
            function[name] = None
    if sort.description == "given":
        function["description"] = "a"
    required: Plain = {"required": []} if sort.has_required else {}
    match sort.parameters:
        case "given":
            function["parameters"] = {
                "type": "object",
                "properties": {_mark(first + 1): {"type": "string", "description": "a"}},
                **required,
            }
            marks.add(first + 1)
        case "without properties":
            function["parameters"] = {"type": "object", **required}
        case "empty":
            function["parameters"] = {}
    return {"type": "function", "function": function}, marks


def _shape(message: Plain) -> Hashable:
    """Everything but texts that decides how a message is written. Messages with equal shapes get
    marks in the same places."""
    calls = message.get("tool_calls")
    content = message.get("content")
    if isinstance(content, str):
        content = bool(content.strip())
    elif isinstance(content, list):
        content = tuple((part["type"], bool(part.get("text", "").strip())) for part in content)
    calls = tuple(map(_shape_of_call, calls)) if isinstance(calls, list) else type(calls).__name__
    keys = tuple(
        (key, bool(value.strip() if isinstance(value, str) else value))
        for key, value in message.items()
    )
    return message["role"], keys, content, calls


def _shape_of_call(call: Any) -> Hashable:
    function = _function(call)
    return isinstance(call, dict), isinstance(function.get("name"), str), _arguments_of(function)


def _shape_of_tools(tools: list[Any] | None) -> Hashable:
    """Whether there is one or several, and of which sorts."""
    functions = [_function(tool) for tool in tools or ()]
    sorts = frozenset(
        (isinstance(function.get("name"), str), tool_sort_of({"function": function}))
        for function in functions
    )
    return min(len(functions), 2), sorts


def _arguments_of(function: Plain) -> Literal["none", "mapping", "JSON", "text"]:
    """Form of a call's arguments. `none`: nothing that must be written."""
    arguments = function.get("arguments")
    if isinstance(arguments, dict) and arguments:
        return "mapping"
    if not isinstance(arguments, str) or not arguments.strip(" {}\n"):
        return "none"
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return "text"
    return "JSON"


def _function(call: Any) -> Plain:
    """The function of a call or a tool, in either form."""
    found = call.get("function", call) if isinstance(call, dict) else {}
    return found if isinstance(found, dict) else {}


class _Marked:
    """Messages and tools with marks in the place of what must be written."""

    def __init__(self) -> None:
        self.places: list[tuple[str, str]] = []
        """Error for a missing mark (its message and the field at fault), by mark."""

    def mark(self, place: str, param: str = "messages") -> str:
        """A new mark."""
        self.places.append((place, param))
        return _mark(len(self.places) - 1)

    def message(self, message: Plain, index: int) -> Plain:
        """`index`: in the conversation."""
        content = message.get("content")
        calls = message.get("tool_calls")
        where = f"messages[{index}]"
        made = dict(message)
        calls_too = ", beside its tool calls" if calls else ""
        place = f"the content of {where} (role {message['role'][:40]!r}){calls_too}"
        mark = partial(self.mark, place)
        if isinstance(content, str) and content.strip():
            made["content"] = mark()
        elif isinstance(content, list):
            made["content"] = [
                {**part, "text": mark()} if part.get("text", "").strip() else part
                for part in content
            ]
        if isinstance(calls, list):
            made["tool_calls"] = [self._call(call, f"the tool calls of {where}") for call in calls]
        return made

    def tool(self, tool: Any) -> Any:
        return self._named(tool, "the tools of this request", "tools")

    def _call(self, call: Any, place: str) -> Any:
        function = _function(call)
        arguments = function.get("arguments")
        match _arguments_of(function):
            case "mapping":
                arguments = {self.mark(place): self.mark(place)}
            case "JSON":
                arguments = json.dumps({self.mark(place): self.mark(place)})
            case "text":
                arguments = self.mark(place)
        return self._named(call, place, "messages", arguments=arguments)

    def _named(self, entry: Any, place: str, param: str, **more: Any) -> Any:
        function = _function(entry)
        if not isinstance(function.get("name"), str):
            return entry
        made = {**function, **more, "name": self.mark(place, param)}
        return {**entry, "function": made} if "function" in entry else made


def _left_out(place: str, param: str) -> RequestError:
    """The error for what a template does not write."""
    return RequestError(
        f"the chat template does not write {place}: the model would never read that. "
        "Leave it out, or have another template used (chat_template).",
        param,
    )
