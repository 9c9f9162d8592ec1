"""Turns chat messages into the prompt that a model was trained on, with the model's own Jinja template.

The environment has the settings, tags, filters and functions that Hugging Face's `apply_chat_template`
gives to templates, so that both render the same text. Templates come with models, that is from
strangers: they run in a sandbox and see plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest, StartupError

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. Rendering is pure but for the date; any thread may do it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: `bos_token` and the like. Raises `StartupError` for a broken template."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt up to where the assistant's answer begins.

        Raises `InvalidRequest` when the template refuses the messages or fails on them.
        """
        values = {**self._special_tokens, **(variables or {})}
        values.update(messages=list(messages), tools=None, documents=None, add_generation_prompt=True)
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks words for training; here it stands for its body."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict(...)` for templates, without the attributes of the real class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace(...)` for templates; names with an underscore could reach the interpreter's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set an attribute called `self`
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were not trained on that."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
