"""Chat templates: the same text and tokens as transformers' apply_chat_template."""

from __future__ import annotations

import json

import pytest
from toolkit_lm.errors import CheckpointError, ConfigError, ContextLengthError, RequestError

CHATML = """{%- for message in messages %}
    {%- if message.content is string %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
    "message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') "
    "}}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + "
    "eos_token}}{% endgeneration %}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif "
    "%}{% endfor %}"
)
TOOLS = """{%- set ns = namespace(seen=0) -%}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- for message in messages %}
  {%- if message.role == "tool" %}{% continue %}{% endif %}
  {%- set ns.seen = ns.seen + 1 %}
{{ ns.seen }} {{ message.role }} <{{ message.content }}> {{ dict(a=message.role) | tojson }}
{{- " " }}{{ {"b": "é<&"} | tojson }}
{{- enable_thinking }}
{%- endfor %}
{{ strftime_now("%Y") }}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "tools": TOOLS}
CHAT = [
    {"role": "user", "content": "  What is the capital of France? 😀 "},
    {"role": "assistant", "content": "Paris.", "name": None},
    {"role": "user", "content": "Sure?\n"},
]


@pytest.fixture(params=list(TEMPLATES))
def both(request, tmp_path, tokenizer, make_renderer):
    """Our renderer and transformers' tokenizer on one checkpoint, as transformers saves it."""
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATES[request.param],
    )
    reference.save_pretrained(tmp_path)
    return make_renderer(
        None, json.loads((tmp_path / "tokenizer_config.json").read_text())
    ), reference


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_same_tokens_as_transformers(both, options):
    renderer, reference = both
    theirs = {"add_generation_prompt": True, **options}
    theirs |= theirs.pop("chat_template_kwargs", {})
    expected = reference.apply_chat_template(CHAT, return_dict=False, **theirs)
    assert renderer.render_conversation(CHAT, **options).token_ids == expected


def test_tools_are_written_as_by_transformers_or_refused(both):
    renderer, reference = both
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    if reference.chat_template != TOOLS:
        with pytest.raises(RequestError, match="does not write the tools of this request"):
            renderer.render_conversation(CHAT, tools=tools)
        return
    expected = reference.apply_chat_template(
        CHAT, return_dict=False, tools=tools, add_generation_prompt=True
    )
    assert renderer.render_conversation(CHAT, tools=tools).token_ids == expected


@pytest.mark.parametrize("answer", ["The capital is ", "Paris", "", " "])
def test_continues_the_final_message_as_transformers_does(both, answer):
    renderer, reference = both
    chat = [CHAT[0], {"role": "assistant", "content": answer}]
    expected = reference.apply_chat_template(chat, continue_final_message=True, return_dict=False)
    assert renderer.render_conversation(chat, continue_final_message=True).token_ids == expected


EMPTY = [{"role": "user", "content": ""}]
"""Conversation for which a template may write nothing."""


def render(renderer, messages=CHAT, **options) -> str:
    return renderer.decode(renderer.render_conversation(messages, **options).token_ids)


@pytest.mark.parametrize(
    ("config", "files", "options"),
    [
        ({}, {}, {"chat_template": "{{ 'here' }}"}),
        ({"chat_template": "{{ 'not me' }}"}, {"chat_template.jinja": "{{ 'here' }}"}, {}),
        ({"chat_template": "{{ 'here' }}"}, {"chat_template.json": '{"chat_template": "no"}'}, {}),
        (
            {
                "chat_template": [
                    {"name": "rag", "template": "no"},
                    {"name": "default", "template": "{{ 'here' }}"},
                ]
            },
            {},
            {},
        ),
        ({}, {"chat_template.json": '{"chat_template": "{{ \'here\' }}"}'}, {}),
    ],
)
def test_where_a_template_is_found(make_renderer, byte_level, config, files, options):
    assert render(make_renderer(byte_level, config, files=files, **options), EMPTY) == "here"


def test_template_file_as_option(tmp_path, make_renderer, byte_level):
    path = tmp_path / "mine.txt"
    path.write_text("{{ 'from a file' }}")
    assert render(make_renderer(byte_level, chat_template=str(path)), EMPTY) == "from a file"


def called(arguments, content=None):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = (
        {"role": "assistant", "tool_calls": [call]}
        if content == "absent"
        else {"role": "assistant", "content": content, "tool_calls": [call]}
    )
    return [CHAT[0], message, {"role": "tool", "tool_call_id": "call_1", "content": "18"}]


CALLS = (
    "{% for m in messages %}{{ m.role ~ ':' + m.content }}{% for c in m.tool_calls %}%s{% endfor "
    "%}{% endfor %}"
)
MAPPINGS = CALLS.replace("%s", "[{{ c.function.name }} {{ c.function.arguments | tojson }}]")
TEXTS = CALLS.replace("%s", "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}")


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
@pytest.mark.parametrize("template", [MAPPINGS, TEXTS])
def test_calls_have_the_arguments_that_the_template_takes_and_a_content(
    make_renderer, byte_level, template, arguments, content
):
    renderer = make_renderer(byte_level, {"chat_template": template})
    expected = f"user:{CHAT[0]['content']}" + 'assistant:[f {"a": "é"}]tool:18'
    assert render(renderer, called(arguments, content)) == expected


def test_arguments_that_a_cut_answer_left_stay_a_text(make_renderer, byte_level):
    renderer = make_renderer(byte_level, {"chat_template": MAPPINGS})
    assert '[f "{\\"a\\": "]' in render(renderer, called('{"a": '))
    assert "[f {}]" in render(renderer, called(""))


def test_tool_use_template(make_renderer, byte_level):
    templates = [
        {"name": "tool_use", "template": "tools {{ tools[0].function.name }}"},
        {"name": "default", "template": "plain"},
    ]
    renderer = make_renderer(byte_level, {"chat_template": templates})
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (render(renderer, EMPTY), render(renderer, EMPTY, tools=tools)) == ("plain", "tools f")


def test_parts_become_a_text(make_renderer, byte_level):
    renderer = make_renderer(byte_level, {"chat_template": CHATML})
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "cat"}]
    assert "user\nThe\ncat<|im_end|>" in render(renderer, [{"role": "user", "content": parts}])


def test_items_that_a_template_does_not_write_are_texts(make_renderer, byte_level):
    """One that writes pictures and no videos gets pictures as parts, and videos as texts."""
    source = (
        "{% for m in messages %}{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' "
        "else p['text'] }}|{% endfor %}{% endfor %}"
    )
    template = make_renderer(byte_level, chat_template=source)._chat_template
    template.set_media({"image": "<image>", "video": "<video>"}, {"image": "I", "video": "V"})
    parts = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": "t"}]
    assert template.render([{"role": "user", "content": parts}], max_length=99) == "V|<image>|t|"
    template = make_renderer(byte_level, chat_template="{{ messages[0]['content'] }}")
    template = template._chat_template
    template.set_media({"image": "<image>", "video": "<video>"}, {"image": "I", "video": "V"})
    assert template.render([{"role": "user", "content": parts}], max_length=99) == "V\nI\nt"


def test_a_template_that_reads_parts_gets_parts(make_renderer, byte_level):
    template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
    )
    renderer = make_renderer(byte_level, {"chat_template": template})
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "cat"}]
    assert (
        render(renderer, [{"role": "user", "content": parts}, {"role": "user", "content": "sat"}])
        == "The|cat|sat|"
    )


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "conversation is empty"),
        (["hello"], {}, "must be a mapping"),
        ([{"content": "hello"}], {}, "must have a 'role'"),
        ([{"role": "user", "content": 3}], {}, "must be a text or a list of parts, not a int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            {},
            "text only, not content of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "must have a 'text'"),
        ([{"role": "user", "content": object()}], {}, "JSON values only, not a object"),
        (
            [{"role": "assistant", "content": "hi"}],
            {},
            "refuses this conversation: Conversation roles must alternate",
        ),
        ([{"role": "user"}], {}, "refuses this conversation|cannot render this conversation"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "cannot set 'messages'"),
        (CHAT, {"chat_templates": "{{ 1 }}"}, "no option 'chat_templates'"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "Cannot set both"),
        ([{"role": "user"}], {"continue_final_message": True}, "content to continue"),
    ],
)
def test_bad_conversations(make_renderer, byte_level, messages, options, message):
    renderer = make_renderer(
        byte_level, {"chat_template": MISTRAL, "bos_token": "<s>", "eos_token": "</s>"}
    )
    with pytest.raises(RequestError, match=message):
        renderer.render_conversation(messages, **options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "refuses|forbids"),
        ("{{ ''.__class__.__subclasses__() }}", "forbids"),
        ("{{ messages.append(1) }}", "forbids"),
        ("{{ namespace(__class__=1) }}", "forbids"),
        ("{% for i in range(10**9) %}x{% endfor %}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render this conversation: ZeroDivisionError"),
    ],
)
def test_the_sandbox(make_renderer, byte_level, template, message):
    with pytest.raises(RequestError, match=message):
        make_renderer(byte_level, {"chat_template": template}).render_conversation(CHAT)


def test_a_rendering_is_bounded(make_renderer, byte_level):
    template = (
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ messages[0].content }}{% "
        "endfor %}{% endfor %}"
    )
    with pytest.raises(ContextLengthError, match="longer ones are not tokenized"):
        make_renderer(
            byte_level, {"chat_template": template}, max_model_len=64
        ).render_conversation(CHAT)


def test_no_template(make_renderer, byte_level):
    with pytest.raises(RequestError, match=r"no chat template\. Give one by chat_template"):
        make_renderer(byte_level).render_conversation(CHAT)


def test_a_template_that_does_not_parse(make_renderer, byte_level):
    with pytest.raises(CheckpointError, match="does not parse: line 1"):
        make_renderer(byte_level, {"chat_template": "{% if %}"})
    with pytest.raises(ConfigError, match="does not parse: line 2"):
        make_renderer(byte_level, chat_template="\n{% if %}")
    with pytest.raises(ConfigError, match="neither a Jinja template nor a file"):
        make_renderer(byte_level, chat_template="missing.jinja")


DOCUMENTS = (
    "{% for one in documents or [] %}[{{ one.title }}]{% endfor %}{% for m in messages %}{{ "
    "m.content }}{% endfor %}"
)


def texts_of(renderer, **options) -> str:
    return renderer.decode(
        renderer.render_conversation([{"role": "user", "content": "hi"}], **options).token_ids
    )


def test_documents(make_renderer, tokenizer):
    renderer = make_renderer(tokenizer, {"chat_template": DOCUMENTS})
    assert texts_of(renderer, documents=[{"title": "one"}, {"title": "two"}]) == "[one][two]hi"
    assert texts_of(renderer) == "hi"
    with pytest.raises(RequestError, match="documents must hold JSON values only"):
        texts_of(renderer, documents=[object()])


def test_a_template_of_the_request(make_renderer, tokenizer):
    """It stands in for the checkpoint's, for this request, and is rendered in the same sandbox."""
    renderer = make_renderer(tokenizer, {"chat_template": DOCUMENTS})
    assert texts_of(renderer, chat_template="<{{ messages[0].content }}>") == "<hi>"
    assert texts_of(renderer) == "hi"
    assert texts_of(make_renderer(tokenizer, {}), chat_template="{{ messages[0].content }}") == "hi"
    for wrong, message in (
        ("{% if %}", "does not parse"),
        ("x" * 10**7, "too long"),
        ("{{ ''.__class__ }}{{ messages.__init__.__globals__ }}", "its sandbox forbids"),
    ):
        with pytest.raises(RequestError, match=message):
            texts_of(renderer, chat_template=wrong)


def test_special_tokens_are_added_where_asked_for(make_renderer, tokenizer):
    renderer = make_renderer(tokenizer, {"chat_template": "{{ messages[0].content }}"})
    message = [{"role": "user", "content": "hi"}]
    expected = renderer.render_prompt("hi").token_ids
    assert renderer.render_conversation(message, add_special_tokens=True).token_ids == expected
    assert (
        renderer.render_conversation(message).token_ids
        == renderer.render_prompt("hi", add_special_tokens=False).token_ids
    )
