"""Chat templates in the styles of models that call functions, written for tests: as short as they may be, and
with what those of the real models ask of messages."""

SYSTEM = "{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n{% endif -%}"
TURNS = (
    SYSTEM
    + """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > messages | length - 3 %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}CALLS<|im_end|>
{% elif m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
)


def turns(calls: str) -> str:
    """A template for models whose turns are ChatML."""
    return TURNS.replace("CALLS", calls)


HERMES = turns(
    """{%- for c in m.tool_calls or [] -%}
{{ '\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{%- endfor -%}"""
)
QWEN = turns(
    """{%- for c in m.tool_calls or [] -%}{{ '\n\n' if loop.first and m.content else ('\n' if not loop.first) }}<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}
</parameter>
{% endfor %}</function>
</tool_call>{%- endfor -%}"""
)
GLM = turns(
    """{%- for c in m.tool_calls or [] -%}{{ '\n' }}<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{%- endfor -%}"""
)
MINIMAX = turns(
    """{%- if m.tool_calls %}{{ '\n' }}<minimax:tool_call>
{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments | items %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{%- endif -%}"""
)
GRANITE = turns(
    """{%- if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}
{%- endfor %}]{%- endif -%}"""
)
NEMOTRON_CALLS = """{%- if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}
{%- endfor %}]</TOOLCALL>{%- endif -%}"""
NEMOTRON = turns(NEMOTRON_CALLS)
APRIEL = turns(NEMOTRON_CALLS.replace("TOOLCALL", "tool_calls"))
COMMAND = turns(
    """{%- if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls -%}
{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}
{%- endfor %}]<|END_ACTION|>{%- endif -%}"""
)
PYTHONIC = turns(
    """{%- if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls -%}
{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}
{%- endfor %}]<|tool_call_end|>{%- endif -%}"""
)
FUNCTIONARY = turns(
    "{%- for c in m.tool_calls or [] %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>{% endfor -%}"
)
# One call at a time, and nothing beside it.
LLAMA = """{%- for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor -%}
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif -%}
<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif -%}"""
# Ids of nine characters, and no message of an assistant without content.
MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages -%}
{%- if m.tool_calls is defined -%}[TOOL_CALLS] [
{%- for c in m.tool_calls -%}
{%- if c.id is undefined or c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif -%}
{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' -%}{{ m.content + eos_token }}
{%- else -%}[INST] {{ m.content }}[/INST]{%- endif -%}
{%- endfor -%}"""
MISTRAL_ARGS = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{ m.content }}
{%- for c in m.tool_calls or [] -%}
{%- set arguments = c.function.arguments if c.function.arguments is string else c.function.arguments | tojson -%}
{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + arguments }}{%- endfor -%}{{ eos_token }}
{%- elif m.role == 'tool' -%}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else -%}[INST]{{ m.content }}[/INST]{%- endif -%}
{%- endfor -%}"""
# Arguments are added to text, so they must be text.
DEEPSEEK = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<｜Assistant｜>{{ m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '<｜tool▁calls▁begin｜>' if loop.first }}<｜tool▁call▁begin｜>{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<｜tool▁call▁end｜>
{{- '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor -%}{{ eos_token }}
{%- elif m.role == 'tool' -%}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- else -%}<｜User｜>{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif -%}"""
# Calls are shown only if there is no content at all.
DEEPSEEK_R1 = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.content is none -%}<｜Assistant｜>
{%- for c in m.tool_calls -%}
{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>
{{- '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor -%}{{ eos_token }}
{%- elif m.role == 'assistant' -%}<｜Assistant｜>{{ m.content + eos_token }}
{%- elif m.role == 'tool' -%}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- else -%}<｜User｜>{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif -%}"""
DEEPSEEK_V32 = turns(
    """{%- if m.tool_calls %}\n\n<｜DSML｜function_calls>
{% for c in m.tool_calls %}<｜DSML｜invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">{{ v if v is string else v | tojson }}</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
{% endfor %}</｜DSML｜function_calls>{%- endif -%}"""
)
# Results are part of the model's own turn.
GEMMA = """{%- macro value(v) -%}
{%- if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}{ {%- for k, x in v | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ value(x) }}{% endfor %}}
{%- elif v is sequence %}[{% for x in v %}{{ ',' if not loop.first }}{{ value(x) }}{% endfor %}]
{%- else %}{{ v }}{% endif -%}
{%- endmacro -%}
{%- for t in tools or [] %}<|tool>declaration:{{ t.function.name }}{description:{{ value(t.function.description) }}}<tool|>{% endfor -%}
{%- for m in messages -%}
<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ value(c.function.arguments) }}<tool_call|>{% endfor -%}
{%- for r in m.tool_responses or [] %}<|tool_response>response:{{ r.name }}{value:{{ value(r.response) }}}<tool_response|>{% endfor -%}
{{ m.content }}{%- if not (m.tool_responses and not m.content) %}<turn|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not messages[-1].tool_responses %}<|turn>model
{% endif -%}"""

TEMPLATES = {
    "hermes": HERMES,
    "qwen-xml": QWEN,
    "glm": GLM,
    "minimax": MINIMAX,
    "granite": GRANITE,
    "nemotron": NEMOTRON,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "deepseek-v3.1": DEEPSEEK,
    "deepseek-v3": DEEPSEEK_R1,
    "deepseek-v3.2": DEEPSEEK_V32,
    "gemma": GEMMA,
    "apriel": APRIEL,
    "command": COMMAND,
    "pythonic": PYTHONIC,
    "functionary": FUNCTIONARY,
    "seed": QWEN.replace("tool_call>", "seed:tool_call>"),
}

# Thoughts are in the history after the last question alone, as in Qwen3's template.
FORGETFUL = (
    "{%- set ns = namespace(asked=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}"
) + HERMES.replace("loop.index0 > messages | length - 3", "loop.index0 > ns.asked")
