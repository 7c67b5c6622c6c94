"""What real templates are made of: renders as in transformers (transformers_jinja.py), or fails in both."""

import pytest
from markupsafe import Markup

from bonsai_jax.tokens import chat_template
from tests.bonsai_jax import transformers_jinja

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'A "city"\n<b>é</b>', "enum": ["Rome", "Ürgüp"]},
        "days": {"type": ["integer", "null"], "default": 3},
        "where": {"type": "object", "properties": {"z": {"type": "array", "items": {"type": "string"}}}},
    },
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "It's <now>", "parameters": PARAMETERS},
}


def called(arguments):
    return [{"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": arguments}}]


def part(text):
    return {"type": "text", "text": text}


CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hi <b>&</b> "}],
    "several": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "reasoning_content": "so"},
        {"role": "user", "content": "and\nthen?"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": called({"é": [1, None, True, 2.5]})},
        {"role": "tool", "name": "weather", "content": '{"t": 3}', "tool_call_id": "abc123def"},
        {"role": "assistant", "content": "3", "tool_calls": called('{"city": "x"}')},
    ],
    "parts": [
        {"role": "user", "content": [part("a"), {"type": "image"}, part("b")]},
        {"role": "assistant", "content": [part("c")]},
    ],
    "none": [],
}  # fmt: skip
VARIABLES = [
    {"add_generation_prompt": True, "tools": [TOOL]},
    {"tools": None, "documents": [{"title": "T", "text": "D"}], "thinking": True, "enable_thinking": False},
    {"add_generation_prompt": True, "enable_thinking": True},
]


def text_or_none(render, error=Exception):
    """What a call renders, None for an error."""
    try:
        return render()
    except error:
        return None


def ours(source, variables):
    return text_or_none(lambda: chat_template.render(source, variables), chat_template.ChatTemplateError)


# Whole templates, short, each with constructs that real ones have.
TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message.content or '') | string + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "lines and blanks": """
{% for message in messages %}
  {% if loop.first %}
first
  {% elif not loop.last %}
    between
  {% else %}
last
  {% endif %}
{{ loop.index }}/{{ loop.length }} {{ loop.revindex0 }}
{% endfor %}

end
""",
    "replace in a loop and in a block": """
{%- block turns -%}
{%- for m in messages if m.content is string -%}
{{ m.role }}: {{ m.content.replace('<b>', '').replace('i', 'I', 1) | replace('&', '+') }};
{%- endfor -%}
{{ bos_token.replace('s', 't') ~ '-'.join(['a', 'b']) ~ 'x'.center(7) ~ '{}'.format(1) }}
{%- endblock -%}
""",
    "format": """
{%- for m in messages -%}
{{ '{}|{role:>10}|{0!r:.5}|{1:05.1f}|{{}}|{2[content]}'.format(m.role, loop.index / 3, m, role=m['role']) }}
{{ '%s of %03d (%%): %r' % (m.role, loop.index, 'é') }}{{ '%-6s|%(a)s' | format(a=m.role) if false }}
{{ '{a}, {b[0]}'.format_map({'a': m.role, 'b': [1]}) }}{{ '%s/%s' | format(m.role, 2) }}
{%- endfor -%}
""",
    "last question": """
{%- set ns = namespace(at=-1, system='', tools=[]) -%}
{%- for m in messages[::-1] -%}
    {%- set index = (messages | length - 1) - loop.index0 -%}
    {%- if m.role == 'user' and m.content is string and not m.content.startswith('<tool') and ns.at < 0 -%}
        {%- set ns.at = index -%}
        {%- set ns.tools = ns.tools + [m.role ~ index] -%}
    {%- endif -%}
{%- endfor -%}
{{ ns.at }} {{ ns.tools | join(', ') }}
{%- for m in messages -%}
    {%- set content = m.content if m.content is string else '' -%}
    {%- set reasoning = '' -%}
    {%- if m.reasoning_content is defined and m.reasoning_content is not none -%}
        {%- set reasoning = m.reasoning_content -%}
    {%- elif '</think>' in content -%}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {%- if loop.index0 > ns.at and (loop.last or reasoning) -%}
        <think>{{ reasoning.strip('\\n') }}</think>
    {%- endif -%}
    {{ content.split('</think>')[-1].lstrip('\\n') }}
{%- endfor -%}
""",
    "calls": """
{%- macro value(v) -%}
    {%- if v is string -%}<|"|>{{ v }}<|"|>
    {%- elif v is boolean -%}{{ 'true' if v else 'false' }}
    {%- elif v is mapping -%}
        { {%- for key, inner in v | dictsort -%}
            {{ ', ' if not loop.first }}{{ key }}:{{ value(inner) }}
        {%- endfor -%} }
    {%- elif v is sequence -%}[{% for inner in v %}{{ value(inner) }}{{ ',' if not loop.last }}{% endfor %}]
    {%- elif v is none -%}null
    {%- else -%}{{ v }}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}{{ tool.function.parameters | tojson(separators=(',', ':')) | safe }}
{{ value(tool['function']['parameters']) }}
{%- for name, spec in tool.function.parameters.properties.items() %}
 {{ loop.index }}. {{ name }} ({{ spec.type if spec.type is string else spec.type | join('|') }}
{{- ', required' if name in tool.function.parameters.required }}): {{ spec.description | default('-', true) }}
{%- endfor %}
{%- endfor -%}
{%- for m in messages if m.tool_calls -%}
    {%- for call in m.tool_calls -%}
        {%- set call = call.function if call.function is defined else call -%}
        {%- set arguments = call.arguments -%}
        {{ call.name }} {{ arguments if arguments is string else arguments | tojson(ensure_ascii=true) }}
        {%- if arguments is mapping -%}
            {%- for key, v in arguments | items -%}
                {{ key }}={{ v | tojson if v is not string else v }}
            {%- endfor -%}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
""",
    "html is escaped behind safe": """
{%- for tool in tools or [] -%}
{{ "Use '" | safe + tool.function.name + "': " + tool.function.description + (tool | tojson) }}
{{ ('<' | safe) ~ '<' ~ ('<' | e) ~ ('"' | escape | upper) ~ ('<b>' | safe | replace('b', '<')) }}
{{ ('<{}>' | safe).format('<') ~ ('<' | safe).join(['<', '>']) ~ ('%s' | safe) % '<' }}
{{ ('<' | safe).replace('<', '>') }}
{%- endfor -%}
""",
    "parts": """
{%- for m in messages -%}
    {%- if m.content is string -%}{{ m.content | trim }}
    {%- elif m.content is iterable and m.content is not mapping -%}
        {%- for part in m.content -%}
            {%- if part.type == 'image' %}<image>{% continue %}{% endif -%}
            {{ part.text }}
            {%- if loop.nextitem is defined %}+{{ loop.nextitem.type }}{% endif -%}
            {%- if loop.previtem is defined %}-{{ loop.previtem.type }}{% endif -%}
        {%- endfor -%}
        {{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\\n') }}
    {%- else -%}{{ raise_exception('content of ' ~ m.role) }}
    {%- endif -%}
{%- endfor -%}
""",
    "roles must alternate": """
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{ ('[INST] ' if m.role == 'user' else '') + m.content | trim + eos_token }}
{%- endfor -%}
""",
    "generation": """
{%- set x = 1 -%}
{% for m in messages %}
    {% if m.role == 'assistant' %}
    {% generation %}
{{ m.content }}{{ loop.index }}{% set x = 2 %}{{ x }}
    {% endgeneration %}
{{ x }}
    {% else %}
{{ m.content }}{{ x }}
    {% endif %}
{% endfor %}
""",
    "breaks": """
{%- for m in messages -%}
    {%- if m.role == 'assistant' %}{% break %}{% endif -%}
    {{ m.role }}{%- for c in m.content %}{% if loop.index > 2 %}{% break %}{% endif %}{{ c }}{% endfor %}
{%- else -%} nobody {%- endfor -%}
""",
    "macros": """
{%- macro turn(role, content='-', end=eos_token) -%}
[{{ role }}|{{ content }}|{{ end }}|{{ varargs | length }}|{{ kwargs | length }}|{{ caller() if caller }}]
{%- endmacro -%}
{{ turn('a') }}{{ turn('b', end='!') }}{{ turn('c', 'd', 'e', 'f', g='h') }}
{%- call turn('x') %}inside {{ bos_token }}{% endcall -%}
{%- filter upper %}loud {{ bos_token | lower }}{% endfilter -%}
{%- set text %}  block {{ messages | length }} {% endset -%}
{%- set shout | trim | upper %}  block {% endset -%}
{{ text | trim ~ shout }}{{ turn.name }}
{%- with a = 1, b = 2 %}{{ a + b }}{% endwith -%}
""",
    "scopes": """
{%- set x = 'outer' -%}
{%- for m in messages %}{% set x = m.role %}{{ x }}{% endfor -%}
{{ x }}{% if true %}{% set x = 'inner' %}{% endif %}{{ x }}
{%- for a, b in [(1, 2), (3, 4)] -%}
{{ a }}{{ b }}{{ loop.cycle('odd', 'even') }}{{ loop.changed(a > 2) }}
{%- endfor -%}
{%- for n in [[1, [2, 3]], 4] recursive %}{{ loop(n) if n is iterable else n }}{{ loop.depth }}{% endfor -%}
{%- set comma = joiner(', ') %}{% for m in messages %}{{ comma() }}{{ m.role }}{% endfor -%}
{%- set row = cycler('a', 'b') %}{% for m in messages %}{{ row.next() }}{% endfor -%}
""",
    "thoughts": """
{%- for m in messages %}
    {%- if m.role == 'assistant' and '</think>' in (m.content or '') | string and not loop.last %}
        {{- m.content.split('</think>')[-1].lstrip('\\n') }}
    {%- elif m.content is string %}{{- m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- elif enable_thinking is defined and not enable_thinking %}!{% endif %}
""",
    "dates": """
{{- strftime_now('%d %B %Y') }}{% if strftime_now is defined %} {{ strftime_now("%Y-%m-%d") }}{% endif %}
{%- if date_string is not defined %}{% set date_string = strftime_now('%-d %b') %}{% endif -%}
{{ date_string ~ messages | length -}}
""",
    "what is missing": """
{%- if tools is not none and tools %}{{ tools | length }}{% endif -%}
{%- if documents is defined and documents | length > 0 %}{{ documents[0]['title'] }}{% endif -%}
{{ missing }}{{ missing | default('d') }}{{ messages[0].missing }}{{ messages[0]['missing'] | default('e') }}
{%- if enable_thinking is defined and enable_thinking is false %}x{% endif -%}
{{ thinking | default(false) }}{{ (thinking or false) and true }}{{ missing is undefined }}
{{ [missing] | length }}
{%- for x in missing %}{{ x }}{% endfor -%}
{%- if messages[0].role == 'system' and 'content' in messages[0] -%}
{{ messages[0]['content'] | trim }}
{%- endif -%}
""",
    "missing in what is missing": "{{ 1 }}{{ messages[0].missing.further if messages | length > 2 }}",
    "nobody": "{{ messages[3] is defined }}{{ messages[3].role if messages | length > 1 }}",
    "no such method": "{{ messages[0].content.missing() if messages else 'none' }}",
    "added to text": "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
    "tool ids": """
{%- for m in messages %}{% for call in m.tool_calls or [] -%}
    {%- if call.id is undefined or call.id | length != 9 %}{{ raise_exception('id') }}{% endif -%}
    {{ call.id[:3] ~ call.id[-3:] ~ call.id[3:6:2] ~ call.id[::-1] ~ call.id[1] }}
{%- endfor %}{% endfor -%}
{{ messages[-1:] | length }}{{ messages[1:] | map(attribute='role') | list }}{{ (messages | first).role }}
""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name):
    texts = set()
    for messages in CONVERSATIONS.values():
        for more in VARIABLES:
            variables = {"messages": messages, "bos_token": "<s>", "eos_token": "</s>", **more}
            expected = text_or_none(lambda: transformers_jinja.render(TEMPLATES[name], variables))  # noqa: B023
            assert ours(TEMPLATES[name], variables) == expected
            texts.add(expected)
    assert len(texts) > 1


VALUES = [
    *(" Ab cd\n", "", "a-b_c d", "<a href='x'>&amp;\"</a>", Markup("<i>")),
    *("Straße", "12", "1.5", "a\x0bb\r\nc\u2028d"),
    *(0, 7, -3, 2.5, True, None, [], [3, 1, 2], ["b", "A", "c", "b"], ("x", "y"), range(4)),
    *({}, {"b": 1, "A": [2], "c": None}, CONVERSATIONS["several"], [TOOL], TOOL),
]
METHODS = """
strip() strip('a') lstrip() rstrip('\\n') split() split('b') split('-',1) rsplit('b',1) splitlines()
upper() lower() title() capitalize() swapcase() casefold() startswith('a') startswith(('a','<'))
endswith('d') find('b') rfind('b') index('b') count('a') count(3) replace('a','<') replace('b','',1)
replace('','.') partition('b') rpartition('b') removeprefix('a') removesuffix('d') isdigit() isalpha()
isupper() isspace() join(['a','b']) join('xy') join([]) center(9,'.') ljust(9) rjust(9,'-') zfill(5)
expandtabs(2) get('b') get('x','d') get('content') items()|list keys()|list values()|list index(1) copy()
format() format(1,a=2)
""".split()  # noqa: SIM905
FILTERS = """
trim trim('a') upper lower capitalize title length count first last list sort sort(reverse=true)
reverse|list unique|list join join(',') join('<') replace('a','<') replace('b','c',1) default('d')
default('d',true) d('e') string string|length int int(5) float round round(1) round(0,'floor') abs tojson
tojson(indent=4) tojson(indent='\\t') tojson(ensure_ascii=true) tojson(sort_keys=true)
tojson(separators=(',',':')) safe e escape indent indent(2) indent(2,true) indent(2,true,true)
indent('>') indent(width=3,first=true) wordcount truncate(5) truncate(4,true,'~',0) center(9) items|list
dictsort dictsort(true) dictsort(by='value') dictsort(reverse=true) map('upper')|list map('string')|join
map('int')|sum map('length')|list map(attribute='role')|list map(attribute='x',default='-')|join
select|list select('string')|list select('equalto',1)|list select('in',[1,2])|list reject('none')|list
reject('odd')|list selectattr('role')|list selectattr('role','equalto','user')|list
selectattr('role','in',['user'])|list|length rejectattr('role','equalto','user')|list
rejectattr('x')|list groupby('role') sum min max sum(start=1) attr('x') format(1)
map('replace','a','b')|list map(attribute='content')|select('string')|join('|')
""".split()  # noqa: SIM905
TESTS = """
string mapping iterable sequence defined undefined none true false boolean number integer float odd even
divisibleby(2) callable lower upper eq(7) equalto('') ne(7) gt(1) ge(7) lt(3) le(0) in([7,'x'])
sameas(none) escaped filter test
""".split()  # noqa: SIM905
OPERATORS = """
~'x' ~none ~1.0 +'x' +1 +[1] *2 *'a' /2 //2 %2 **2 -1 ==7 !=7 <3 >=2 [0] [-1] [1:] [:-1] [::-1] [::2]
.role ['role']
""".split()  # noqa: SIM905
EXPRESSIONS = {
    "methods": [f"v.{method}" for method in METHODS],
    "filters": [f"v | {filter}" for filter in FILTERS],
    "tests": [f"v is {test}" for test in TESTS] + [f"v is not {test}" for test in TESTS],
    "operators": [
        *(f"v {operator}" for operator in OPERATORS),
        *("'a' in v", "1 not in v", "v and 'y'", "v or 'n'", "not v", "v if v else 'no'", "-v", "2 * v"),
        *("'x' + v", "v ~ v", "[v, v]", "v == v", "'%s' % v", "'{}!'.format(v)", "'{0[b]}'.format(v)"),
        "'{v!r:>9.5}'.format(v=v)",
    ],
}
# No text of these means anything: where Python keeps a function or a generator.
ADDRESSES = ("built-in method", "bound method", "object at 0x", "dict_items", "Markup(")


@pytest.mark.parametrize("kind", EXPRESSIONS)
def test_every_operation_on_every_value_is_as_in_transformers(kind):
    differing, compared = [], 0
    for expression in EXPRESSIONS[kind]:
        source = "{{ " + expression + " }}"
        oracle = transformers_jinja.compiled(source)
        for variables in ({}, *({"v": value} for value in VALUES)):
            expected = text_or_none(lambda: oracle.render(variables))  # noqa: B023 - called at once
            if expected is not None and any(text in expected for text in ADDRESSES):
                continue
            compared += expected is not None
            if (text := ours(source, variables)) != expected:
                differing.append((source, variables, expected, text))
    assert not differing and compared > 4 * len(EXPRESSIONS[kind])
