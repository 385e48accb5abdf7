"""Chat templates written for tests: the variables of Qwen's published ones, and little more."""

_SYSTEM = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or system %}
  {{- '<|im_start|>system\\n' + system }}
  {%- if tools %}
    {{- '\\n# Tools' }}{%- for tool in tools %}{{- '\\n' }}TOOL{%- endfor %}{{- how }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
"""
_MESSAGES = """
{%- for m in messages %}
  {%- if m.content is not string %}{{- raise_exception('Content is a text.') }}{%- endif %}
  {%- if m.role == 'system' %}
    {%- if not loop.first %}{{- raise_exception('The system message comes first.') }}{%- endif %}
  {%- elif m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if m.reasoning_content and KEPT %}
      {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}CALL{%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- else %}{{- raise_exception('Unexpected role.') }}{%- endif %}
{%- endfor %}
"""
_XML_CALL = """
  {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
  {%- for name, value in call.function.arguments | items %}
    {{- '<parameter=' + name + '>\\n' }}{{- value if value is string else value | tojson }}
    {{- '\\n</parameter>\\n' }}
  {%- endfor %}
  {{- '</function>\\n</tool_call>' }}
"""
_JSON_CALL = """
  {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
  {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
"""
_LISTED_TOOL = """
  {{- tool.function.name }}
  {%- for name, schema in tool.function.parameters.properties.items() %}
    {{- '\\n' + name + ': ' + schema.type }}
  {%- endfor %}
"""
_JSON_TOOL = "{{- tool | tojson }}"
_XML_HOW = "{%- set how = '\\n<function=NAME><parameter=KEY>' %}"
_JSON_HOW = '{%- set how = \'\\n<tool_call>{"name": NAME, "arguments": {}}\' %}'
_LAST_USER = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
  {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
    {%- set last.user = loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- if last.user < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
"""
_OPENING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}THINK{%- endif %}"
_THINK = (
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}"
)


def _efforts(*taken: str, default: str) -> str:
    return f"""
{{%- set effort = reasoning_effort if reasoning_effort is defined else '{default}' %}}
{{%- if effort not in {list(taken)} %}}
  {{{{- raise_exception('Unknown effort ' + effort) }}}}
{{%- endif %}}
{{{{- '<|im_start|>effort ' + effort + '<|im_end|>\\n' }}}}
"""


def _template(
    *parts: str, xml: bool = True, kept: str = "loop.index0 > last.user", think: str = _THINK
) -> str:
    call, how = (_XML_CALL, _XML_HOW) if xml else (_JSON_CALL, _JSON_HOW)
    text = "".join((how, *parts, _SYSTEM, _MESSAGES, _OPENING))
    tool = _LISTED_TOOL if xml else _JSON_TOOL
    words = {"TOOL": tool, "KEPT": kept, "CALL": call, "THINK": think}
    for word, body in words.items():
        text = text.replace(word, body)
    return text


_PRESERVED = "(preserve_thinking is defined and preserve_thinking or loop.index0 > last.user)"
CODER, Q35, Q36, Q38 = "Qwen3-Coder", "Qwen3.5", "Qwen3.6", "Qwen3.8"
TWO_EFFORTS, NO_VARIABLES, LAST_ASKS = "two efforts", "no variables", "the last message asks"
TEMPLATES = {
    CODER: _template(kept="false", think=""),
    Q35: _template(_LAST_USER),
    Q36: _template(_LAST_USER, kept=_PRESERVED),
    Q38: _template(
        _efforts("low", "medium", "high", "xhigh", default="high"), _LAST_USER, kept=_PRESERVED
    ),
    # As published by the community.
    TWO_EFFORTS: _template(_efforts("low", "high", default="low"), _LAST_USER, xml=False),
    NO_VARIABLES: _template(xml=False, kept="true", think="{{- '<think>\\n' }}"),
    LAST_ASKS: _template(
        _LAST_USER,
        "{%- if messages[-1].role not in ('user', 'tool') %}"
        "{{- raise_exception('The last message must ask.') }}{%- endif %}",
        kept="true",
    ),
}
XML = (CODER, Q35, Q36, Q38, LAST_ASKS)
