"""Formats of tool calls that a layout states, by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import JsonCalls
from toolkit_lm_parsers.marked_json import JsonLayout, MarkedJsonFormat
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.structures import Structure, calls, choice, tag
from toolkit_lm_parsers.tagged import Layout, LayoutParser, TaggedFormat, refusal

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_RECEIVER = ">>>"
_DSML = f"{_BAR}DSML{_BAR}"

# Calls as JSON between marks


class ApertusFormat(MarkedJsonFormat):
    """Apertus: <|tools_prefix|>[{"name": {...}}]<|tools_suffix|>."""

    keeps_special_tokens = True
    layout = JsonLayout(("<|tools_prefix|>", "<|tools_suffix|>"), is_list=True, keys=None)
    shown_by = ("<|tools_prefix|>",)


class CohereFormat(MarkedJsonFormat):
    """Command R7B, Command A and newer: <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]
    <|END_ACTION|>."""

    keeps_special_tokens = True
    layout = JsonLayout(
        ("<|START_ACTION|>", "<|END_ACTION|>"), is_list=True, keys=("tool_name", "parameters")
    )
    shown_by = ("<|START_ACTION|>",)


class FunctionTagFormat(MarkedJsonFormat):
    """Functionary 3.1: <function=name>{...}</function>."""

    keeps_special_tokens = True
    layout = JsonLayout(call=("<function=", "</function>"), name=("", ">"), separator="")
    shown_by = ("<function=", "</function>")
    not_shown_by = ("<parameter=", "<tool_call>")


class GigaChatFormat(MarkedJsonFormat):
    """GigaChat 3: function call<|role_sep|>{"name": ..., "arguments": {...}}."""

    keeps_special_tokens = True
    layout = JsonLayout(call=("function call<|role_sep|>\n", ""), others=("<|message_sep|>",))
    shown_by = ("function call<|role_sep|>",)


class GraniteFormat(MarkedJsonFormat):
    """Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}]. Granite 4 writes `hermes`."""

    keeps_special_tokens = True
    layout = JsonLayout(("<|tool_call|>", ""), is_list=True)
    shown_by = ("<|tool_call|>",)
    not_shown_by = ("<|/tool|>",)


class GraniteCodeFormat(MarkedJsonFormat):
    """Granite 20B function calling: <function_call> {"name": ..., "arguments": {...}}."""

    keeps_special_tokens = True
    layout = JsonLayout(call=("<function_call> ", ""))
    shown_by = ("<function_call>",)


class HunyuanFormat(MarkedJsonFormat):
    """Hunyuan A13B and Jamba: <tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>."""

    keeps_special_tokens = True
    layout = JsonLayout(("<tool_calls>", "</tool_calls>"), is_list=True)
    shown_by = ("<tool_calls>",)
    not_shown_by = ("<arg_key>", "<begin_of_document>")


class InternLmFormat(MarkedJsonFormat):
    """InternLM 2.5 and 3: <|action_start|><|plugin|>{"name": ..., "parameters": {...}}
    <|action_end|>."""

    keeps_special_tokens = True
    layout = JsonLayout(
        call=("<|action_start|><|plugin|>", "<|action_end|>"), keys=("name", "parameters")
    )
    shown_by = ("<|plugin|>",)


class KimiFormat(MarkedJsonFormat):
    """Kimi K2: a section of calls functions.name:number, each with its arguments."""

    keeps_special_tokens = True
    layout = JsonLayout(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        name=("functions.", ":{number}<|tool_call_argument_begin|>"),
        separator="",
    )
    shown_by = ("<|tool_calls_section_begin|>",)


class LongCatFormat(MarkedJsonFormat):
    """LongCat-Flash: <longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>."""

    keeps_special_tokens = True
    layout = JsonLayout(call=("<longcat_tool_call>", "</longcat_tool_call>"))
    shown_by = ("<longcat_tool_call>",)


class MiniMaxJsonFormat(MarkedJsonFormat):
    """MiniMax M1: as Hunyuan's, each call on a line of its own and no list."""

    keeps_special_tokens = True
    layout = JsonLayout(("<tool_calls>\n", "\n</tool_calls>"))
    shown_by = ("<tool_calls>", "<begin_of_document>")


class NemotronFormat(MarkedJsonFormat):
    """Nemotron Nano 2 and Llama Nemotron: <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>.
    Nemotron 3 writes `qwen3_coder`."""

    keeps_special_tokens = True
    layout = JsonLayout(("<TOOLCALL>", "</TOOLCALL>"), is_list=True)
    shown_by = ("<TOOLCALL>",)


class PhiFormat(MarkedJsonFormat):
    """Phi-4-mini: functools[{"name": ..., "arguments": {...}}], or the same after <|tool_call|>."""

    keeps_special_tokens = True
    layout = JsonLayout(("<|tool_call|>", "<|/tool_call|>"), is_list=True, words=("functools[",))
    shown_by = ("<|/tool|>",)


# Calls whose parameters stand between tags


class DeepSeekTagsFormat(TaggedFormat):
    """DeepSeek V4: DSML, tags around calls, functions and parameters."""

    keeps_special_tokens = True
    layout = Layout(
        f'<{_DSML}invoke name="{{name}}">\n',
        f'<{_DSML}parameter name="{{name}}" string="{{is_text}}">{{value}}</{_DSML}parameter>\n',
        f"</{_DSML}invoke>",
        (f"<{_DSML}tool_calls>\n", f"\n</{_DSML}tool_calls>"),
        others=(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
    )
    shown_by = (f"{_DSML}tool_calls",)


class DeepSeekTagsV32Format(DeepSeekTagsFormat):
    """DeepSeek V3.2: as V4, in <function_calls> of DSML."""

    layout = Layout(
        DeepSeekTagsFormat.layout.call,
        DeepSeekTagsFormat.layout.parameter,
        DeepSeekTagsFormat.layout.end,
        (f"<{_DSML}function_calls>\n", f"\n</{_DSML}function_calls>"),
        others=(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"),
    )
    shown_by = (f"{_DSML}function_calls",)


class GlmFormat(TaggedFormat):
    """GLM-4.5 and newer: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>
    </tool_call>."""

    keeps_special_tokens = True
    layout = Layout(
        "<tool_call>{name}\n",
        "<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n",
        "</tool_call>",
    )
    shown_by = ("<arg_key>",)
    not_shown_by = ("<tool_sep>",)


class HunyuanTagsFormat(TaggedFormat):
    """Hunyuan 3: as GLM's, with <tool_sep> after the name and <tool_calls> around all."""

    keeps_special_tokens = True
    layout = Layout(
        "<tool_call>{name}<tool_sep>\n",
        GlmFormat.layout.parameter,
        "</tool_call>",
        ("<tool_calls>\n", "\n</tool_calls>"),
    )
    shown_by = ("<arg_key>", "<tool_sep>")


class KimiTagsFormat(TaggedFormat):
    """Kimi K3: channels, of which one has calls with typed arguments."""

    keeps_special_tokens = True
    layout = Layout(
        '<|open|>call tool="{name}" index="{number}"<|sep|>',
        '<|open|>argument key="{name}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        separator="",
        others=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
    )
    shown_by = ("<|open|>tools<|sep|>",)


class MiniCpmFormat(TaggedFormat):
    """MiniCPM 5: <function name="f"><param name="key">value</param></function>."""

    keeps_special_tokens = True
    layout = Layout(
        '<function name="{name}">', '<param name="{name}">{value}</param>', "</function>"
    )
    shown_by = ("<function name=", "<param name=")


class MiniMaxFormat(TaggedFormat):
    """MiniMax M2: <minimax:tool_call><invoke name="f"><parameter name="key">value</parameter>
    </invoke></minimax:tool_call>."""

    keeps_special_tokens = True
    layout = Layout(
        '<invoke name="{name}">\n',
        '<parameter name="{name}">{value}</parameter>\n',
        "</invoke>",
        ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    )
    shown_by = ("<minimax:tool_call>",)


class SeedFormat(TaggedFormat):
    """Seed-OSS: Qwen3-Coder's tags in <seed:tool_call>."""

    keeps_special_tokens = True
    layout = Layout(
        "<seed:tool_call>\n<function={name}>\n",
        "<parameter={name}>{value}</parameter>\n",
        "</function>\n</seed:tool_call>",
    )
    shown_by = ("<seed:tool_call>",)


class SolarFormat(TaggedFormat):
    """Solar Open 2: a mark before the name, and three around each parameter."""

    keeps_special_tokens = True
    layout = Layout(
        "<|tool_call:start|>{name}\n",
        "<|tool_arg:start|>{name}<|tool_arg:value|>{value}<|tool_arg:end|>\n",
        "<|tool_call:end|>",
    )
    shown_by = ("<|tool_call:start|>",)


_STEP_CALL = f"<{_BAR}tool_call_begin{_BAR}>"
_STEP_SEP = f"<{_BAR}tool_sep{_BAR}>"


class StepParser(LayoutParser):
    """Reads Step 3's calls: before a function's tag stand its type and its name once more."""

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark == _STEP_CALL:
            begin = self.at
            yield from self.close("function")
            if self.at > begin:
                yield from self.accept(_STEP_SEP)
                yield from self.word(("\n", self.layout.function.begin, *self.opens, *self.closes))
        return (yield from super().read_calls(mark))


class StepFormat(TaggedFormat):
    """Step 3: <steptml:invoke name="f"><steptml:parameter name="key">value</steptml:parameter>
    </steptml:invoke> between marks."""

    keeps_special_tokens = True
    layout = Layout(
        f'{_STEP_CALL}function{_STEP_SEP}<steptml:invoke name="{{name}}">',
        '<steptml:parameter name="{name}">{value}</steptml:parameter>',
        f"</steptml:invoke><{_BAR}tool_call_end{_BAR}>",
        (f"<{_BAR}tool_calls_begin{_BAR}>", f"<{_BAR}tool_calls_end{_BAR}>"),
        separator=_STEP_SEP,
        opens=(f"<{_BAR}tool_calls_begin{_BAR}>", _STEP_CALL),
        others=(_STEP_SEP,),
    )
    shown_by = ("<steptml:invoke",)

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return StepParser(self.layout, tools)


# Calls that a name begins


class FunctionaryParser(JsonCalls):
    """Reads Functionary 3.2's parts: each has a receiver on its first line, all or a function."""

    opens = (_RECEIVER,)
    ends = (_RECEIVER,)

    def __init__(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._is_begun = prompt_end.endswith(_RECEIVER)

    def run(self) -> Reading[None]:
        begun = self._is_begun
        while not self.at_end:
            if not begun and (yield from self.until((_RECEIVER,), self.say)) is None:
                return
            begun = False
            self.keep()
            name = yield from self.word(("\n", _RECEIVER))
            if name == "all":
                yield from self.accept("\n")
                self.release()
                self.separate()
                continue
            if name is not None:
                yield from self.spaces()
                arguments = yield from self.json_arguments(name)
                if arguments is not None and self.call(name, arguments):
                    yield from self.spaces()
                    continue
            self.give_up()


class FunctionaryFormat(AnswerFormat):
    """Functionary 3.2: >>>name, a new line and arguments; >>>all before content."""

    finds = ("tool_calls",)
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return refusal(template, (f"{_RECEIVER}all",), ())

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return FunctionaryParser(prompt_end, tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        # The prompt has begun the first part.
        called = calls(tools, _begun, "", parallel=parallel, separator=_RECEIVER)
        if required:
            return called
        amid = calls(
            tools, lambda name: f"{_RECEIVER}{name}\n", "", parallel=parallel, trigger=_RECEIVER
        )
        return choice(called, self.content(amid))

    def content(self, structure: Structure) -> Structure:
        return tag("all\n", structure, "")


def _begun(name: str) -> str:
    return f"{name}\n"
