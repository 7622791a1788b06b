# ruff: noqa: E501 - a line break would be part of a template
"""Small chat templates, one for each family of models: written here, with what the family's own
template does about forms.

They are short: of each family's texts only the marks are kept, and of its code what it asks of
messages and tools.
"""

from __future__ import annotations

FAMILIES = {}
# A content is joined to a text; no tools, no other roles.
FAMILIES["chatml"] = """
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Contents are trimmed, a message has one call, whose text is lost; results are JSON, since a text
# is iterable too.
FAMILIES["llama 3.1"] = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start|>system<|end|>' + system + '<|eot|>' }}
{%- if tools is not none %}{% set first = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{{- '<|start|>user<|end|>' }}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ first + '<|eot|>' }}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start|>' + message['role'] + '<|end|>' + message['content'] | trim + '<|eot|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start|>assistant<|end|>{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}}<|eot|>
{%- else %}{{ '<|start|>ipython<|end|>' }}
{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}{{ '<|eot|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}{% endif %}"""
# Roles must alternate; a system message is part of the first user's.
FAMILIES["llama 2"] = """
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set rest = messages %}{% set system = false %}{% endif %}
{%- for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] if loop.index0 == 0 and system != false else m['content'] %}
{%- if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
# Ids of nine letters; a call is one where there is a key; tools stand before the last user's
# message.
FAMILIES["mistral"] = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}{% if not (m.role == 'tool' or m.role == 'tool_results' or (m.tool_calls is defined and m.tool_calls is not none)) %}
{%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in rest %}
{%- if m['role'] == 'user' %}
{%- if tools is not none and (m == users[-1]) %}{{ '[AVAILABLE_TOOLS][' }}
{%- for t in tools %}{% set t = t.function %}{{ '{"type": "function", "function": {' }}
{%- for key, val in t.items() if key != 'return' %}{% if val is string %}{{ '"' + key + '": "' + val + '"' }}
{%- else %}{{ '"' + key + '": ' + val|tojson }}{% endif %}{{ ', ' if not loop.last }}{% endfor %}{{ '}}' }}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}{% endif %}
{%- if loop.last and system is defined %}{{ '[INST]' + system + '\n\n' + m['content'] + '[/INST]' }}
{%- else %}{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}{% set out = c.function|tojson %}{{ out[:-1] }}
{%- if not c.id is defined or c.id|length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- ', "id": "' + c.id + '"}' }}{% endfor %}{{ ']' + eos_token }}
{%- elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}
{%- elif m['role'] == 'tool' %}
{%- set content = m.content.content if m.content is defined and m.content.content is defined else m.content %}
{{- '[TOOL_RESULTS]{"content": ' + content|string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
# A mapping is written as JSON, and a text once more; results are the user's; other roles are left
# out.
FAMILIES["qwen 2.5"] = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}
{{- '<tools>' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}{{ '</tools><|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>' + message.role }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}{% if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}{{ tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# A value that is not a text is ignored; arguments have either form; reasoning is kept after the
# last question only.
FAMILIES["qwen 3"] = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{%- for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{% set thought = '' %}
{%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
{%- elif '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if loop.index0 > ns.last and thought %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
{%- for tool_call in message.tool_calls %}{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Calls are written where a content is none, and an answer where it is not: a message with both
# loses its calls.
FAMILIES["deepseek r1"] = """
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['content'] is none %}
{%- for c in m['tool_calls'] %}{{ '<|call|>' + c['type'] + '<|sep|>' + c['function']['name'] + '\n```json\n' + c['function']['arguments'] + '\n```' }}{% endfor %}
{%- elif m['role'] == 'assistant' %}{% set content = m['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + '<|end|>' }}
{%- elif m['role'] == 'tool' %}{{ '<|output|>' + m['content'] + '<|outputs|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
# A content beside calls is joined to a text unless it is none: its absence is an error.
FAMILIES["deepseek v3.1"] = """
{%- set ns = namespace(system='', first=true) %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}
{%- for c in m['tool_calls'] %}
{%- if m['content'] is none %}{{ '<|calls|>' + c['function']['name'] + '<|sep|>' + c['function']['arguments'] }}
{%- else %}{{ m['content'] + '<|calls|>' + c['function']['name'] + '<|sep|>' + c['function']['arguments'] }}{% endif %}{% endfor %}{{ '<|end|>' }}
{%- elif m['role'] == 'assistant' %}{{ '<|Assistant|></think>' + m['content'] + '<|end|>' }}
{%- elif m['role'] == 'tool' %}{{ '<|output|>' + m['content'] + '<|output end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|></think>' }}{% endif %}"""
# No system messages, and roles must alternate.
FAMILIES["gemma 2"] = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# Texts or parts, but of a system message's parts the first alone.
FAMILIES["gemma 3"] = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}{% set prefix = messages[0]['content'] + '\n\n' %}
{%- else %}{% set prefix = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}{% set rest = messages[1:] %}
{%- else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + (prefix if loop.first else '') }}
{%- if m['content'] is string %}{{ m['content'] | trim }}
{%- elif m['content'] is iterable %}{% for item in m['content'] %}{% if item['type'] == 'image' %}<image>{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}
{%- else %}{{ raise_exception('Invalid content type') }}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# Parts alone: a text is gone through letter by letter, and nothing of it is written.
FAMILIES["smolvlm"] = """<|im_start|>
{%- for m in messages %}{{ m['role'] | capitalize }}{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}
{%- for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
# Roles that are known, and no others; an empty system message is none.
FAMILIES["phi 3"] = """
{%- for m in messages %}{% if m['role'] == 'system' and m['content'] %}{{ '<|system|>\n' + m['content'] + '<|end|>\n' }}
{%- elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}
{%- elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
# A call is one piece of JSON, with its arguments in it; a system message is the first one.
FAMILIES["phi 4"] = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|system|>' + system }}{% for t in tools or [] %}{{ '<|tool|>' + (t['function'] | tojson) + '<|/tool|>' }}{% endfor %}{{ '<|end|>' }}
{%- for m in messages %}
{%- if m['role'] == 'tool' %}{{ '<|tool_response|>' + (m['content'] | tojson) + '<|end|>' }}
{%- elif m['role'] != 'system' %}{{ '<|' + m['role'] + '|>' }}{% if m.content %}{{ m['content'] }}{% endif %}
{%- for c in m.tool_calls %}{{ '<|tool_call|>' + (c['function'] | tojson) + '<|/tool_call|>' }}{% endfor %}{{ '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# Calls are written as Python writes them, unless each is JSON by itself; documents are read.
FAMILIES["granite"] = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = 'Today.' %}{% set rest = messages %}{% endif %}
{{- '<|role|>system<|end|>' + system + '<|eot|>\n' }}
{%- if tools %}{{ '<|role|>tools<|end|>' }}{{ tools | tojson(indent=4) }}{{ '<|eot|>\n' }}{% endif %}
{%- if documents %}{{ '<|role|>documents<|end|>' }}{% for d in documents %}{{ d['text'] }}{% endfor %}{{ '<|eot|>\n' }}{% endif %}
{%- for m in rest %}{{ '<|role|>' + m['role'] + '<|end|>' }}
{%- if m.content %}{{ m['content'] }}{% endif %}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{{ '<|tool_call|>' }}{{ c.function | tojson }}{% endfor %}{% endif %}{{ '<|eot|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|role|>assistant<|end|>' }}{% endif %}"""
# Beside calls a plan is written, which is reasoning, and no content; None where a description is
# null.
FAMILIES["command r7b"] = """{{ bos_token }}
{%- if messages[0]['role']|lower == 'system' %}{% set preamble = messages[0]['content'] %}{% endif %}
{{- '<|SYSTEM|>' }}{% for t in tools or [] %}{"name": "{{ t['function']['name'] }}", "description": "{{ t['function']['description'] }}", "parameters": {{ t['function']['parameters']|tojson }}}
{% endfor %}{% for d in documents or [] %}{{ d | tojson }}{% endfor %}
{%- if preamble %}{{ preamble }}{% endif %}{{ '<|END|>' }}
{%- for m in messages %}
{%- if m.role|lower == 'system' and not (loop.first and preamble) %}{{ '<|SYSTEM|>' }}{{ m.content }}{{ '<|END|>' }}
{%- elif m.role|lower == 'user' %}{{ '<|USER|>' }}{{ m.content }}{{ '<|END|>' }}
{%- elif m.role|lower == 'assistant' %}{{ '<|CHATBOT|>' }}
{%- if m.tool_calls %}{{ '<|THINKING|>' }}{{ m.reasoning_content }}{{ '<|ACTION|>' }}
{%- for c in m.tool_calls %}{"tool_name": "{{ c['function']['name'] }}", "parameters": {{ c['function']['arguments']|tojson }}}{% endfor %}
{%- else %}{{ '<|RESPONSE|>' }}{{ m.content }}{% endif %}{{ '<|END|>' }}
{%- elif m.role|lower == 'tool' %}{{ '<|RESULT|>' }}{{ m.content|tojson }}{{ '<|END|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|CHATBOT|>' }}{% endif %}"""
# Texts or parts of a user, None for nothing; arguments are a mapping; of results in parts each is
# written as Python has it.
FAMILIES["glm 4"] = """[gMASK]<sop>
{%- macro visible(content) %}
{%- if content is string %}{{ content }}{% elif content is iterable and content is not mapping %}
{%- for item in content %}{% if item is mapping and item.type == 'text' %}{{ item.text }}{% elif item is string %}{{ item }}{% endif %}{% endfor %}
{%- else %}{{ content }}{% endif %}{% endmacro %}
{%- if tools %}<|system|>{% for t in tools %}{{ '\n' }}{{ t | tojson(ensure_ascii=False) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>{{ visible(m.content) }}
{%- elif m.role == 'assistant' %}<|assistant|>{% set content = visible(m.content) %}{% if content.strip() %}{{ '\n' + content.strip() }}{% endif %}
{%- for c in m.tool_calls or [] %}{% if c.function %}{% set c = c.function %}{% endif %}{{ '\n<tool_call>' + c.name }}
{%- for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|>
{%- if m.content is string %}{{ '<tool_response>' + m.content + '</tool_response>' }}
{%- else %}{% for r in m.content %}{{ '<tool_response>' }}{{ r.output if r.output is defined else r }}{{ '</tool_response>' }}{% endfor %}{% endif %}
{%- elif m.role == 'system' %}<|system|>{{ visible(m.content) }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# It cannot do without tools, and goes through their properties: a tool without any is an error.
FAMILIES["hermes"] = """{{ bos_token }}<|im_start|>system
{% for t in tools %}{% if t.function is defined %}{% set t = t.function %}{% endif %}{{ t.name + '(' }}
{%- for name, field in t.parameters.properties.items() %}{{ name }}: {{ field.type }}{{ ', ' if not loop.last }}{% endfor %}{{ ') ' + t.description + '\n' }}{% endfor %}<|im_end|>
{% for m in messages %}
{%- if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- for c in m.tool_calls %}{{ '\n<tool_call>\n' }}{% if c.function is defined %}{% set c = c.function %}{% endif %}
{{- '{"name": "' + c.name + '", "arguments": ' }}{{ c.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>tool\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Roles by name.
FAMILIES["zephyr"] = """
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + eos_token }}
{%- elif m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + eos_token }}
{%- elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + eos_token }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"""
# A result has the name of its function.
FAMILIES["internlm"] = """{{ bos_token }}
{%- if tools %}{{ '<|im_start|>system name=<|plugin|>\n' }}{{ tools | map(attribute='function') | list | tojson }}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>environment name=' + m.name + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' and m.get('tool_calls') is not none and m.get('tool_calls') %}{{ '<|im_start|>assistant\n' + m.get('content', '') }}
{%- for c in m.tool_calls %}{{ '<|action_start|><|plugin|>{"name": "' + c.function.name + '", "parameters": ' }}{{ c.function.arguments | tojson }}{{ '}<|action_end|>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Words for roles, and contents without empty lines.
FAMILIES["falcon"] = """
{%- for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}
{%- if m['role'] == 'system' %}{{ 'System: ' }}{% elif m['role'] == 'user' %}{{ 'User: ' }}{% elif m['role'] == 'assistant' %}{{ 'Falcon: ' }}{% endif %}
{{- m['content'].strip().replace('\r\n', '\n').replace('\n\n', '\n') }}{% endfor %}
{%- if add_generation_prompt %}{{ '\nFalcon:' }}{% endif %}"""
# The last answer is written apart; a system message is the first; None is looked for.
FAMILIES["nemotron"] = """
{%- if messages[0]['role'] != 'system' %}{% set system = '' %}{% else %}{% set system = (messages[0]['content'] | default('', true)).strip() %}{% endif %}
{{- '<SPECIAL>System\n' + system }}
{%- if tools %}{{ '\n<AVAILABLE_TOOLS>[' }}{% for t in tools %}{{ (t.function if t.function is defined else t) | tojson }}{% endfor %}{{ ']</AVAILABLE_TOOLS>' }}{% endif %}
{%- for m in (messages[1:] if messages[0]['role'] == 'system' else messages) %}{% set content = m['content'] %}
{%- if m['role'] == 'user' %}{{ '<SPECIAL>User\n' + (content | default('', true)).strip() + '\n' }}
{%- elif m['role'] == 'tool' %}{{ '<TOOL_RESPONSE>[' }}{{ m['content'] }}{{ ']</TOOL_RESPONSE>\n' }}
{%- elif m['role'] == 'assistant' %}{{ '<SPECIAL>Assistant\n' + ((content | default('', true)).strip() if content is not none else '') }}
{%- if m.tool_calls %}{{ '<TOOLCALL>[' }}{% for c in m.tool_calls %}{% set f = c.function if c.function is defined else c %}{{ '{"name": "' + f.name + '", "arguments": ' }}
{%- if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}{{ '}' }}{% endfor %}{{ ']</TOOLCALL>' }}{% endif %}{{ '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<SPECIAL>Assistant\n<think>\n' }}{% endif %}"""
# A content that is none is gone through, which is an error; a result is named by the id of its
# call.
FAMILIES["kimi"] = """
{%- macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}<|im_system|>system<|im_middle|>{% elif m.role == 'user' %}<|im_user|>user<|im_middle|>{% elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>{% endif %}
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ said(m.content) }}
{%- if m.role == 'assistant' and m.get('tool_calls') %}<|calls|>{% for c in m.tool_calls %}{{ c['id'] }} {{ c['function']['name'] }}
{%- if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}{% else %}{{ c['function']['arguments'] | tojson }}{% endif %}{% endfor %}<|calls end|>{% endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
# Instructions are the developer's; reasoning is `thinking`; a result needs a call before it, and
# has its name.
FAMILIES["gpt-oss"] = """<|start|>system<|message|>You are a model.<|end|>
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}{% set developer = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set developer = '' %}{% set rest = messages %}{% endif %}
{%- if developer or tools %}<|start|>developer<|message|>{% if developer %}{{ developer }}{% endif %}
{%- for t in tools or [] %}{% set f = t.function %}
// {{ f.description }}
type {{ f.name }} = ({% if f.parameters and f.parameters.properties %}{% for name, field in f.parameters.properties.items() %}{{ name }}: {{ field.type }}{% endfor %}{% endif %}) => any;{% endfor %}<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking beside calls') }}{% endif %}
{%- if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% elif m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set c = m.tool_calls[0] %}{% if c.function %}{% set c = c.function %}{% endif %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}{{ c.arguments | tojson }}<|call|>{% set last.name = c.name %}
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set last.name = none %}
{%- elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|message|>' }}{{ m.content | tojson }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
# Arguments that are no mapping are left out, and so is any role that it does not know.
FAMILIES["minimax"] = """
{%- macro visible(content) %}{% if content is string %}{{ content }}{% elif content is iterable and content is not mapping %}{% for item in content %}{% if item is mapping and item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}{% else %}{{ content }}{% endif %}{% endmacro %}
{%- if messages[0].role == 'system' %}{% set system = messages[0] %}{% set rest = messages[1:] %}{% else %}{% set system = none %}{% set rest = messages %}{% endif %}
{{- ']~b]system\n' }}{% if system and system.content %}{{ visible(system.content) }}{% endif %}
{%- if tools %}<tools>{% for t in tools %}<tool>{{ t.function | tojson }}</tool>{% endfor %}</tools>{% endif %}{{ '[e~[\n' }}
{%- set last = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' %}{{ ']~b]ai\n' + visible(m.content) }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{% if c.function %}{% set c = c.function %}{% endif %}{{ '<invoke name="' + c.name + '">' }}
{%- if c.arguments is mapping %}{% for k, v in c.arguments.items() %}{{ '<parameter name="' + k + '">' }}{{ v if v is string else v | tojson }}</parameter>{% endfor %}{% endif %}</invoke>{% endfor %}
{%- set last.name = m.tool_calls[-1].function.name %}{% else %}{% set last.name = none %}{% endif %}{{ '[e~[\n' }}
{%- elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- ']~b]tool' }}{% if m.content is string %}<response>{{ m.content }}</response>{% else %}{% for r in m.content %}<response>{{ r.output if r.output is defined else (r.text if r.type == 'text' else r) }}</response>{% endfor %}{% endif %}{{ '[e~[\n' }}
{%- elif m.role == 'user' %}{{ ']~b]user\n' + visible(m.content) + '[e~[\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"""
# Functions by themselves: neither tools nor calls have a mapping `function`.
FAMILIES["bare functions"] = """
{%- for t in tools or [] %}{{ '<tool>' + t.name + ' ' + t.parameters | tojson + '</tool>' }}{% endfor %}
{%- for m in messages %}{{ '<' + m.role + '>' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c.name + ' ' + c.arguments | tojson + '</call>' }}{% endfor %}{% endfor %}"""
