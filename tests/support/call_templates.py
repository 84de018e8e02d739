"""How the chat templates of models treat tool calls and their arguments, each in a few lines: what they write, take and refuse."""

DEEPSEEK_TOKENS = [
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin"),
        *("tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    )
]

_DEEPSEEK_CALL = (
    "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments']"
    " + '\\n```<｜tool▁call▁end｜>'"
)
_DEEPSEEK = (
    "{% set ns = namespace(tool=false, system='') %}{% for m in messages if m['role'] == 'system' %}"
    "{% set ns.system = ns.system + m['content'] %}{% endfor %}{{ bos_token + ns.system }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m['content'] }}{% endif %}CALLS"
    "{% if m['role'] == 'tool' %}{{ ('\\n' if ns.tool else '<｜tool▁outputs▁begin｜>') + '<｜tool▁output▁begin｜>' + m['content'] }}"
    "{{ '<｜tool▁output▁end｜>' }}{% set ns.tool = true %}{% endif %}{% endfor %}{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}THINK"
)
_DEEPSEEK_SAID = (
    "{{ ('<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>') + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% set ns.tool = false %}"
)
DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALLS",
    "{% if m['role'] == 'assistant' and 'tool_calls' in m %}{% set ns.tool = false %}{{ '<｜Assistant｜>' + (m['content'] or '') }}"
    "{{ '<｜tool▁calls▁begin｜>' }}{% for tool in m['tool_calls'] %}{{ ('' if loop.first else '\\n') + "
    + _DEEPSEEK_CALL
    + " }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{% elif m['role'] == 'assistant' %}" + _DEEPSEEK_SAID + "{% endif %}",
).replace("THINK", "")
DEEPSEEK_R1 = DEEPSEEK_V3 + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
FIRST_DEEPSEEK = _DEEPSEEK.replace(
    "CALLS",
    "{% if m['role'] == 'assistant' and m['content'] is none %}{% for tool in m['tool_calls'] %}"
    "{{ ('<｜Assistant｜><｜tool▁calls▁begin｜>' if loop.first else '\\n') + " + _DEEPSEEK_CALL + " }}{% endfor %}"
    "{% elif m['role'] == 'assistant' %}" + _DEEPSEEK_SAID + "{% endif %}",
).replace("THINK", "")
"""V3 and R1 as they first came, and their distillations: calls are shown only where the content is null."""

_TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.tool_calls %}{% for call in m.tool_calls %}CALL{% endfor %}"
_END = "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"


def _of_calls(call: str) -> str:
    return _TURNS.replace("CALL", call) + _END


QWEN_2_5 = _of_calls("{{ '<tool_call>\\n{\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}")
QWEN_3 = _of_calls(
    "{% set call = call.function if call.function else call %}"
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}"
)
HERMES_3 = _of_calls("{% if call.function is defined %}{% set call = call.function %}{% endif %}{{ call.arguments | tojson }}")
LLAMA_3_1 = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{% else %}{{ m.role + m.content }}{% endif %}{% endfor %}"
)
GLM_4_5 = _of_calls(
    "{{ call.function.name }}{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}"
)
KIMI_K2 = _of_calls(
    "{{ call['id'] + '<|argument|>' }}{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
)
MISTRAL = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{{ m.content }}{% elif m.tool_calls %}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ m.content + m.tool_call_id }}{% else %}{{ raise_exception('Only user, assistant and tool roles') }}{% endif %}{% endfor %}"
)
STRINGIFIED = _of_calls("{{ 'call ' ~ call.function.arguments }}")
"""A template that takes anything, and shows an object in Python's own form."""

GEMMA_2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ m.role + m.content }}{% endfor %}"
)
