"""The sandboxed renderer against the reference renderer, on templates of the kinds that models carry."""

import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.core.errors import InvalidRequest, ModelFormatError
from headrace.prompts.template import ChatTemplate, TemplateLimits

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather for <city> & 'country': 日本",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1.0}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "no_arguments", "description": "", "parameters": {}}},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich <3"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello, world!"}],
    "system": [{"role": "system", "content": " Be <b>brief</b>.\n"}, {"role": "user", "content": "Hi  "}],
    "turns": [
        {"role": "user", "content": "a & b < c > \"d\" 'e' \u2028"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\n日本 🙂"},
        {"role": "user", "content": "{{ messages }} {% raw %}", "name": "eve"},
    ],
    "assistant last": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\n<think>a</think>b"}],
    "wrong order": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
    "tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 21.5}'},
        {"role": "tool", "content": "rain"},
    ],
    "two calls": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ok", "tool_calls": [CALL, CALL]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "é\n"}]}],
    "role": [{"role": "narrator", "content": "x"}],
    "empty": [{"role": "user", "content": ""}],
    "reasoning": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "reasoning": "z"}],
}
TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What ``transformers`` renders; None if it refuses."""
    try:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **SPECIAL, **options)
    except Exception:
        return None
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False, "date_string": "1 May 2025"}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_what_the_reference_renders(
    template: str, conversation: str, add_generation_prompt: bool, options: dict[str, Any]
) -> None:
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    expected = reference(source, messages, add_generation_prompt=add_generation_prompt, **options)
    chat = ChatTemplate({"default": source}, variables=SPECIAL)
    before = json.dumps(messages)
    if expected is None:
        with pytest.raises(InvalidRequest):
            chat.render(messages, add_generation_prompt=add_generation_prompt, **options)
    else:
        assert chat.render(messages, add_generation_prompt=add_generation_prompt, **options) == expected
    assert json.dumps(messages) == before


def test_enough_of_the_matrix_renders_that_equality_means_something() -> None:
    rendered = [reference(source, messages) for source in TEMPLATES.values() for messages in CONVERSATIONS.values()]
    assert sum(text is not None for text in rendered) > len(rendered) / 2


def test_the_template_speaks_for_itself() -> None:
    chat = ChatTemplate({"default": TEMPLATES["alternating"]}, variables=SPECIAL)
    with pytest.raises(InvalidRequest) as refusal:
        chat.render(CONVERSATIONS["wrong order"])
    assert refusal.value.message == "Roles must alternate user/assistant/user/assistant/..."
    assert refusal.value.param == "messages"


def test_the_date_is_todays() -> None:
    chat = ChatTemplate(
        {"default": "{{ strftime_now('%d %B %Y') }}"}, now=lambda: datetime.datetime(2031, 2, 3, tzinfo=datetime.UTC)
    )
    assert chat.render([]) == "03 February 2031"


def test_keys_without_a_value_are_not_seen() -> None:
    chat = ChatTemplate({"default": "{{ 'tool_calls' in messages[0] }}"})
    assert chat.render([{"role": "user", "tool_calls": None}]) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages | tojson }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j | tojson }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% if messages | tojson %}{% endif %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{{ 'ab' * 10 ** 12 }}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{% set _ = messages.append(messages) %}{{ messages | tojson }}",
    ],
)
def test_a_template_without_end_is_stopped_quickly(source: str) -> None:
    chat = ChatTemplate({"default": source})
    started = time.perf_counter()
    with pytest.raises(InvalidRequest):
        chat.render([{"role": "user", "content": "x" * 100_000}])
    # Some 40 ms on a quiet machine; the bound is for a busy one.
    assert time.perf_counter() - started < 1.0


def test_a_long_conversation_is_no_loop() -> None:
    messages = [{"role": role, "content": "word"} for role in ("user", "assistant")] * 10_000
    chat = ChatTemplate({"default": TEMPLATES["thinking_tools"]})
    assert chat.render(messages).count("word") == 20_000


def test_a_long_text_is_no_loop() -> None:
    chat = ChatTemplate({"default": TEMPLATES["dated_tools"]}, variables=SPECIAL)
    assert len(chat.render([{"role": "user", "content": "long " * 1_600_000}])) > 7_999_999


@pytest.mark.parametrize(
    "source",
    [
        "a {% generation %} b {% endgeneration %} c",
        "a {%- generation -%} b {%- endgeneration -%} c",
        "a\n  {% generation %}\n  b\n  {% endgeneration %}\n c",
        "{% generation -%}\n b{% set x = 1 %}\n{%- endgeneration %} {{ x }}",
    ],
)
def test_generation_marks_only_trim(source: str) -> None:
    assert ChatTemplate({"default": source}).render([]) == reference(source, [])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.environ }}",
        "{{ debug() }}",
    ],
)
def test_templates_reach_nothing_outside(source: str) -> None:
    try:
        rendered = ChatTemplate({"default": source}).render([{"role": "user", "content": "x"}])
    except InvalidRequest:
        return
    assert rendered.strip() == ""


def test_nesting_is_bounded() -> None:
    deep: dict[str, object] = {"role": "user", "content": "x"}
    for _ in range(2000):
        deep = {"role": "user", "content": deep}
    with pytest.raises(InvalidRequest, match="nested"):
        ChatTemplate({"default": "{{ messages | tojson }}"}).render([deep])


def test_limits_can_be_set() -> None:
    chat = ChatTemplate(
        {"default": "{% for i in range(100) %}{% endfor %}"}, limits=TemplateLimits(fuel=50, fuel_per_message=0)
    )
    with pytest.raises(InvalidRequest, match="did not end"):
        chat.render([])


def test_calls_of_tojson_are_bounded_on_their_own() -> None:
    source = "{% for i in range(3) %}{{ i | tojson }}{% endfor %}"
    assert ChatTemplate({"default": source}).render([]) == "012"
    with pytest.raises(InvalidRequest, match="did not end"):
        ChatTemplate({"default": source}, limits=TemplateLimits(num_tojson_chars=1000)).render([])


@pytest.mark.parametrize("source", ["{{ 1 + }}", "{% for %}", "{% if x %}", "{{ 'a", "{% nonsense %}"])
def test_a_template_that_is_not_valid_is_found_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template 'default' is not valid"):
        ChatTemplate({"default": source})


def write(directory: Path, name: str, content: object) -> None:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>"})
    assert ChatTemplate.load(tmp_path) is None


def test_loads_the_template_and_the_special_tokens(tmp_path: Path) -> None:
    write(
        tmp_path,
        "tokenizer_config.json",
        {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": None},
    )
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<old>", "eos_token": "</s>"})
    chat = ChatTemplate.load(tmp_path)
    assert chat is not None
    assert chat.render([]) == "<s></s>"
    assert not chat.reads_tools


def test_a_template_file_wins_over_the_configured_one(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "configured"})
    write(tmp_path, "chat_template.jinja", "from the file")
    chat = ChatTemplate.load(tmp_path)
    assert chat is not None
    assert chat.render([]) == "from the file"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    write(tmp_path, "additional_chat_templates/rag.jinja", "rag")
    chat = ChatTemplate.load(tmp_path)
    assert chat is not None
    assert set(chat.names) == {"default", "tool_use", "rag"}
    assert chat.render([]) == "plain"
    assert chat.render([], tools=[]) == "plain"
    assert chat.render([], tools=TOOLS) == "2 tools"


@pytest.mark.parametrize("value", [7, ["text"], [{"name": "a"}], [{"name": "a", "template": ""}] * 1 + [{"name": "b"}]])
def test_chat_templates_of_the_wrong_shape_are_named(tmp_path: Path, value: object) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ModelFormatError, match="chat_template"):
        ChatTemplate.load(tmp_path)


def test_several_templates_need_a_default() -> None:
    with pytest.raises(ModelFormatError, match="default"):
        ChatTemplate({"a": "", "b": ""})
    assert ChatTemplate({"only": "x"}).render([]) == "x"
