"""Chat templates of the shapes that Qwen's published models have, written anew and cut short."""

from __future__ import annotations

_HEAD = """
{%- macro system_text() -%}
{{ messages[0].content if messages and messages[0].role == 'system' else '' }}
{%- endmacro %}
{%- for m in messages %}
  {%- if m.role == 'system' and not loop.first %}
    {{- raise_exception('A system message comes first or not at all.') }}
  {%- endif %}
{%- endfor %}
{%- if tools or system_text() %}
  {{- '<|im_start|>system\\n' + system_text() }}
  {%- if tools %}
    {{- '\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n' + how }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if m.reasoning_content %}
      {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
      {%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}
"""
_TAIL = """
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
"""
_JSON_CALL = """
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
"""
_XML_CALL = """
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
      {%- for name, value in call.function.arguments | items %}
        {{- '<parameter=' + name + '>\\n' }}
        {%- if value is string %}{{- value }}{%- else %}{{- value | tojson }}{%- endif %}
        {{- '\\n</parameter>\\n' }}
      {%- endfor %}
      {{- '</function>\\n</tool_call>' }}
"""
_ANSWER = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_THINKS = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)
_JSON_HOW = '{%- set how = \'<tool_call>{"name": ..., "arguments": ...}</tool_call>\' %}'
_XML_HOW = "{%- set how = '<tool_call><function=...><parameter=...>' %}"

NEXT_INSTRUCT = _JSON_HOW + _HEAD + _JSON_CALL + _TAIL + _ANSWER
"""JSON calls, no thinking."""
NEXT_THINKING = (
    _JSON_HOW
    + _HEAD
    + _JSON_CALL
    + _TAIL
    + _ANSWER.replace("assistant\\n'", "assistant\\n<think>\\n'")
)
"""JSON calls; thinking can't be switched off."""
CODER = _XML_HOW + _HEAD + _XML_CALL + _TAIL + _ANSWER
"""Calls as tags, no thinking."""
QWEN3_5 = _XML_HOW + _HEAD + _XML_CALL + _TAIL + _THINKS
"""Calls as tags; thinking is on, and can be switched off."""

TEMPLATES = {
    "next-instruct": NEXT_INSTRUCT,
    "next-thinking": NEXT_THINKING,
    "coder": CODER,
    "3.5": QWEN3_5,
}
