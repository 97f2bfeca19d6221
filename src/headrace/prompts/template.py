"""Chat templates: a model's own Jinja program, run in a sandbox with limits."""

import datetime
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import minijinja
import msgspec

from headrace.core.errors import HeadraceError, InvalidRequest, ModelFormatError
from headrace.prompts.tokenizer import read_json, special_token

_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MAX_TEMPLATE_CHARS = 1_000_000
_MAX_NESTING = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MIN_TOJSON_CHARS = 512
"""What a call of ``tojson`` counts for at least: it costs far more than its instruction."""


class TemplateLimits(msgspec.Struct, frozen=True):
    """What one rendering may use. A template that hits a limit did not end by itself.

    Fuel is instructions, and every 64 characters that an instruction reads or makes: it bounds the output, too. A
    hundred thousand take some 3 ms, or 30 ms when every third is a call into Python. What the messages may use grows
    with their number and their length, so that no conversation is too long for an honest template.
    """

    fuel: int = 100_000
    fuel_per_message: int = 1_000
    fuel_per_char: float = 0.25
    num_tojson_chars: int = 4_000_000
    """Characters that all calls of ``tojson`` make together."""


DEFAULT_LIMITS = TemplateLimits()

ENDLESS = "the model's chat template did not end in time for these messages"


class _Refused(Exception):
    """The template's own words about why it does not render these messages."""


class ChatTemplate:
    """Turns messages into the text that a model was trained to continue.

    It renders what ``transformers`` renders: blocks are trimmed, ``tojson`` leaves HTML alone, ``raise_exception`` and
    ``strftime_now`` exist, ``{% generation %}`` marks nothing. A template can reach neither files nor attributes of
    Python objects, and works on a copy of the messages. May be used from any thread.

    The limits stop loops and recursion. What they do not count, a server must stop from outside: see
    :mod:`headrace.prompts.isolated`.

    Known differences: ``title()`` looks for spaces only, and ``%`` does not format strings (``format`` does).
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        variables: Mapping[str, str] | None = None,
        limits: TemplateLimits = DEFAULT_LIMITS,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """``templates`` by name, of which ``default`` is used unless there are tools and a ``tool_use``.

        ``variables``, such as ``bos_token``, are visible to the template.

        Raises:
            ModelFormatError: a template is not valid, or none is called ``default`` and there are several.
        """
        if "default" not in templates and len(templates) != 1:
            raise ModelFormatError(f"chat templates are named {sorted(templates)}; one must be called 'default'")
        self._sources = {name: _without_generation_tags(source) for name, source in templates.items()}
        self._default = "default" if "default" in templates else next(iter(templates))
        self._variables = dict(variables or {})
        self._limits = limits
        self._now = now
        self._local = threading.local()
        environment = self._environment()
        for name, source in self._sources.items():
            if len(source) > _MAX_TEMPLATE_CHARS:
                raise ModelFormatError(f"the chat template '{name}' has {len(source)} characters; too long to be one")
            try:
                environment.add_template(name, source)
            except minijinja.TemplateError as error:
                raise ModelFormatError(f"the chat template '{name}' is not valid: {_words(error)}") from error

    @classmethod
    def load(cls, directory: Path, *, limits: TemplateLimits = DEFAULT_LIMITS) -> "ChatTemplate | None":
        """The template of a model directory, or None if the model has none.

        ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` win over what tokenizer_config.json holds.

        Raises:
            ModelFormatError: as the constructor; or the files cannot be read.
        """
        config = read_json(directory / "tokenizer_config.json")
        special_tokens_map = read_json(directory / "special_tokens_map.json")
        templates = _configured_templates(config.get("chat_template"), directory)
        named = {"default": directory / "chat_template.jinja"}
        named.update({path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))})
        for name, path in named.items():
            if path.is_file():
                templates[name] = _read_text(path)
        if not templates:
            return None
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        tokens = {name: special_token(config, name) or special_token(special_tokens_map, name) for name in names}
        variables = {name: token for name, token in tokens.items() if token is not None}
        return cls(templates, variables=variables, limits=limits)

    @property
    def sources(self) -> dict[str, str]:
        """The templates by name, as they are compiled."""
        return dict(self._sources)

    @property
    def variables(self) -> dict[str, str]:
        """What every rendering sees beside the messages, such as ``bos_token``."""
        return dict(self._variables)

    @property
    def limits(self) -> TemplateLimits:
        """What one rendering may use."""
        return self._limits

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates."""
        return tuple(self._sources)

    @property
    def reads_tools(self) -> bool:
        """Whether a template looks at ``tools`` at all; if not, tools passed would be dropped in silence."""
        return any("tools" in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt for ``messages``. Special tokens stand in it: encode it with ``add_special_tokens=False``.

        A content is text or a list of parts, as the caller wrote it; keys whose value is None are left out.
        ``variables`` are what else the template may read (``enable_thinking``, ``documents``, …).

        Raises:
            InvalidRequest: the template refused the messages (its words are the message), could not be rendered with
                them, or hit a limit.
        """
        name = "tool_use" if tools and "tool_use" in self._sources else self._default
        copy = _Copy()
        context = {
            "documents": None,
            **self._variables,
            **{key: copy.of(value) for key, value in variables.items()},
            "messages": [copy.of(_as_templates_know_it(message)) for message in messages],
            "tools": copy.of(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        environment = self._prepared_environment()
        limits = self._limits
        for_messages = limits.fuel_per_message * len(messages) + limits.fuel_per_char * copy.num_chars
        environment.fuel = limits.fuel + int(for_messages)
        self._local.num_tojson_chars = 0
        try:
            text: str = environment.render_template(name, **context)
        except _Refused as refusal:
            raise InvalidRequest(str(refusal), param="messages") from refusal
        except HeadraceError:
            raise
        except minijinja.TemplateError as error:
            raise InvalidRequest(_explain(error), param="messages") from error
        except (TypeError, ValueError, RecursionError, OverflowError, KeyError, AttributeError) as error:
            # Raised by the functions below, or by the library's conversion of what the template computed.
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error
        return text

    def _prepared_environment(self) -> minijinja.Environment:
        # The library holds a lock while it renders and calls back into Python; one environment for each thread means
        # that no thread can wait for it with the interpreter's lock in hand.
        environment: minijinja.Environment | None = getattr(self._local, "environment", None)
        if environment is None:
            environment = self._environment()
            for name, source in self._sources.items():
                environment.add_template(name, source)
            self._local.environment = environment
        return environment

    def _environment(self) -> minijinja.Environment:
        environment = minijinja.Environment(
            filters={"tojson": self._tojson},
            globals={"raise_exception": _raise_exception, "strftime_now": self._strftime_now},
            auto_escape_callback=lambda _name: False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.remove_global("debug")
        return environment

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature that templates are written for
        indent: int | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002
    ) -> str:
        pair = None if separators is None else (separators[0], separators[1])
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
        self._local.num_tojson_chars += max(len(text), _MIN_TOJSON_CHARS)
        if self._local.num_tojson_chars > self._limits.num_tojson_chars:
            raise _Refused(ENDLESS)
        return text

    def _strftime_now(self, form: str) -> str:
        return self._now().strftime(form)


def _as_templates_know_it(message: Mapping[str, object]) -> Mapping[str, object]:
    """Without keys that have no value; and reasoning, which clients call by several names, by those templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _raise_exception(message: object = "") -> None:
    raise _Refused(str(message))


def _without_generation_tags(source: str) -> str:
    """``{% generation %}`` marks what an assistant said, for training. ``with`` opens the same kind of scope."""
    return _GENERATION_TAG.sub(lambda tag: f"{{%{tag[1]} {tag[2] or ''}with {tag[3]}%}}", source)


def _configured_templates(value: object, directory: Path) -> dict[str, str]:
    """``chat_template`` of tokenizer_config.json: one text, or a list of ``{"name": …, "template": …}``."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = msgspec.convert(value, list[_NamedTemplate])
    except msgspec.ValidationError as error:
        raise ModelFormatError(f"{directory / 'tokenizer_config.json'}: chat_template: {error}") from error
    return {named.name: named.template for named in templates}


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path}: cannot read the chat template: {error}") from error


class _Copy:
    """Copies JSON-like data, so that lists which a template changes are its own, and counts the characters in it."""

    def __init__(self) -> None:
        self.num_chars = 0

    def of(self, value: object, depth: int = 0) -> Any:
        if depth > _MAX_NESTING:
            raise InvalidRequest(f"messages and tools may be nested {_MAX_NESTING} deep", param="messages")
        if isinstance(value, str):
            self.num_chars += len(value)
            return value
        if value is None or isinstance(value, int | float):
            return value
        if isinstance(value, Mapping):
            return {str(key): self.of(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item, depth + 1) for item in value]
        raise InvalidRequest(f"a chat template is given JSON values, not {type(value).__name__}", param="messages")


def _explain(error: minijinja.TemplateError) -> str:
    if error.kind == "OutOfFuel":
        return ENDLESS
    return f"the model's chat template cannot render these messages: {_words(error)}"


def _words(error: minijinja.TemplateError) -> str:
    """What the library says in one line, with the line of the template."""
    message: str = error.message
    return message.splitlines()[0] if message else error.kind
