"""Small chat templates that write turns as the families' published templates do.

Each has the family's tags, white space and types of arguments. Instructions about tools are short:
they only have the signs by which a server recognises the notation.
"""

from __future__ import annotations

# Keeps reasoning only after the last question, and begins to think unless enable_thinking is false.
_QWEN_TURNS = """
{%- set last = namespace(index=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set last.index = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > last.index %}
{{- '<think>\\n' + message.reasoning_content|trim + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
CALL
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
OPEN
{%- endif %}
"""
_ALWAYS_OPEN = """
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
{{- '<think>\\n' }}
{%- endif %}
"""
_OPEN_IF_ASKED = """
{%- if enable_thinking is defined %}
{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
_CLOSED_IF_ASKED = """
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""

_QWEN3_CALL = """
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
"""
_QWEN35_CALL = """
{%- if not loop.first %}{{- '\\n' }}{%- elif message.content %}{{- '\\n\\n' }}{%- endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments|items %}
{%- set listed = value is mapping or (value is sequence and value is not string) %}
{{- '<parameter=' + name + '>\\n' }}
{{- value | tojson if listed else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
"""
_MINICPM5_CALL = """
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<function name="' ~ call.function.name ~ '">' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<param name="' ~ name ~ '">' }}
{%- if value is string and ('<' in value or '&' in value or '\\n' in value) %}
{{- '<![CDATA[' + value + ']]>' }}
{%- else %}
{{- value }}
{%- endif %}
{{- '</param>' }}
{%- endfor %}
{{- '</function>' }}
"""

QWEN3 = _QWEN_TURNS.replace("CALL", _QWEN3_CALL).replace("OPEN", _CLOSED_IF_ASKED)
QWEN35 = _QWEN_TURNS.replace("CALL", _QWEN35_CALL).replace("OPEN", _ALWAYS_OPEN)
MINICPM5 = _QWEN_TURNS.replace("CALL", _MINICPM5_CALL).replace("OPEN", _OPEN_IF_ASKED)

MINICPM4 = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.tool_calls %}
{{- '<|tool_call_start|>\\n```python\\n' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' }}
{%- for name, value in call.function.arguments|items %}
{{- name + '=' + value|tojson }}{{- ',' if not loop.last }}
{%- endfor %}
{{- ')\\n' }}
{%- endfor %}
{{- '```\\n<|tool_call_end|>\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Its instruction has the sign of the notation. One call a turn, without content.
LLAMA31 = """
{%- for message in messages %}
{%- if loop.first and tools %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\\n' }}
{%- endif %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- message.content|trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL_TURNS = """
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
CALLS
{{- '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- message.content + '</s>' }}
{%- endif %}
{%- endfor %}
"""
# This template refuses ids of another length.
MISTRAL_LIST = _MISTRAL_TURNS.replace(
    "CALLS",
    """
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id|length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}
{%- endfor %}
{{- ']' }}
""",
)
MISTRAL_NAMED = _MISTRAL_TURNS.replace(
    "CALLS",
    """
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}
""",
)

# The prompt closes the thought only if that is asked for. Nested keys have quotes,
# unlike those of the published template.
GEMMA4 = """
{%- macro write(value) -%}
{%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
{%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
{%- elif value is mapping -%}
{{- '{' -}}
{%- for key, each in value | dictsort -%}
{{- ',' if not loop.first -}}{{- '<|"|>' + key + '<|"|>:' -}}{{- write(each) -}}
{%- endfor -%}
{{- '}' -}}
{%- elif value is sequence -%}
{{- '[' -}}
{%- for each in value -%}{{- ',' if not loop.first -}}{{- write(each) -}}{%- endfor -%}
{{- ']' -}}
{%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- for message in messages %}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.tool_calls and message.reasoning_content %}
{{- '<|channel>thought\\n' + message.reasoning_content + '<channel|>' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- if call.function.arguments is mapping %}
{%- for key, value in call.function.arguments | dictsort %}
{{- ',' if not loop.first }}{{- key + ':' }}{{- write(value) }}
{%- endfor %}
{%- else %}
{{- call.function.arguments }}
{%- endif %}
{{- '}<tool_call|>' }}
{%- endfor %}
{{- message.content }}{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<|channel>thought\\n<channel|>' }}
{%- endif %}
{%- endif %}
"""
