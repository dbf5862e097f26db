"""Chat templates with tools: short ones that look at tools and write calls as those of known models do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TURNS = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}"
_END = "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
HERMES = (
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- "\\n</tools>\\nwithin <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, '
    '\\"arguments\\": <args-json-object>}\\n</tool_call>\\n" }}{%- endif %}'
    + _TURNS
    + '{% for call in m.tool_calls %}{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}}\n</tool_call>{% endfor %}" + _END
)
LLAMA = (
    '{%- if tools is not none %}{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}.' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}"
    + _TURNS
    + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('This model only supports single tool-calls "
    'at once!\') }}{% endif %}{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{- m.tool_calls[0].function.arguments | tojson }}}{% endif %}" + _END
)
MISTRAL = (
    "{%- if tools is not none %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls is defined %}{{- '[TOOL_CALLS][' }}{%- for call in m.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{- ', ' if not loop.last }}"
    "{%- endfor %}{{- ']' }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + ' of ' + m.tool_call_id + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)
NAMES_FIRST = MISTRAL.replace("{{- '[TOOL_CALLS][' }}", "").replace(
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{- ', ' if not loop.last }}"
    "{%- endfor %}{{- ']' }}",
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{%- endfor %}",
)
TEXT_ARGUMENTS = _TURNS + "{% for call in m.tool_calls %}{{ '<call>' + call.function.arguments }}{% endfor %}" + _END
QWEN_THINKS = HERMES + "{# <think> #}"
THINKS = _TURNS + "</s>\n{% endfor %}<s>assistant\n<think>\n"  # and so does the answer begin
MAY_THINK = THINKS.removesuffix("\n") + "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n{% endif %}\n"
MAGISTRAL = MISTRAL + "{# [THINK] #}"

FORECAST = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
CLOSED: Mapping[str, Any] = {**FORECAST, "additionalProperties": False}


def tool(name: str, parameters: Mapping[str, Any] = CLOSED, **beside: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "a & b", "parameters": parameters, **beside}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(*names_and_arguments: tuple[str, str, str]) -> Sequence[dict[str, Any]]:
    """Calls by id, name and arguments, as clients have them."""
    return [
        {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        for identity, name, arguments in names_and_arguments
    ]
