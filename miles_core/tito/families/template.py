"""Any tokenizer with a chat template, best effort.

The template is Jinja that somebody else wrote, so three things are taken care of around it. Text that spells a special
token is broken up by a private-use character before rendering and mended afterwards, so that only what the template
itself writes becomes a token. What each message added is found by rendering every cut; a template whose rendering of a
cut is no prefix of the next is refused, with the message where it breaks. And the junction is read off a probe.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.families import Evidence, ModelFamily, ParsedReply, Segment, Tokenizer
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.errors import ModelError
from miles_core.tito.families.hermes import HermesCalls

__all__ = ["TemplateConfig", "TemplateFamily", "compile_template"]

_PRIVATE_USE = [chr(code) for code in range(0xE000, 0xF8FF)]


def _plain(text: str) -> ParsedReply:
    return ParsedReply(content=text)


def _hermes(text: str) -> ParsedReply:
    content, calls, malformed = HermesCalls().extract(text)
    return ParsedReply(content=content, tool_calls=calls, malformed=malformed)


PARSERS: Mapping[str, Callable[[str], ParsedReply]] = {"text": _plain, "hermes": _hermes}


class TemplateConfig(ComponentConfig):
    """Section `[model.family]` of `template`."""

    directory: str
    """Directory with the tokenizer (tokenizer.json) and its chat template."""
    template: str = "default"
    """Name of the chat template, where the directory has several; or the path of a .jinja file."""
    parser: Literal["text", "hermes"] = "text"
    """How replies are read: `text`, all of it is content; `hermes`, with Hermes tool calls."""
    stop: tuple[str, ...] = ()
    """Special tokens that end an assistant turn; the tokenizer's eos token when empty."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template (`enable_thinking = false`, …)."""


class TemplateFamily(ModelFamily[TemplateConfig]):
    """Renders with the tokenizer's own chat template.

    Append-only at every cut that it accepts; cuts inside a run of tool results are not looked at, since templates
    join those into one block. `miles families probe` says what a template does to conversations.
    """

    Config = TemplateConfig
    evidence: Evidence = "unverified"

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """ChatML, from the tokenizer's own template."""
        return Example(settings={"directory": str(bench.tokenizer)})

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> list[Segment]:
        """See `ModelFamily.segments`. Raises `ValueError` where the template is not append-only, or raises itself."""
        guard = self._guard(messages, tools)
        shielded = [self._shield(message, guard) for message in messages]
        offered = _map_text(list(tools), functools.partial(self._break_up, guard=guard))
        out: list[Segment] = []
        done = ""
        for stop in self._cuts(messages):
            index, last = stop - 1, stop == len(messages)
            assistant = messages[index].get("role") == "assistant"
            if assistant:
                header = self._render(shielded[:index], offered, generate=True)
                out += self._added(done, header, guard, role="assistant", message=index)
                done = header
            try:
                text = self._render(shielded[:stop], offered, generate=False)
            except ValueError:
                if last or assistant:
                    raise
                continue  # no conversation ends here for this template (a system prompt alone)
            out += self._added(done, text, guard, role=messages[index]["role"], message=index, sampled=assistant)
            done = text
        if add_generation_prompt:
            text = self._render(shielded, offered, generate=True)
            out += self._added(done, text, guard, role="assistant", message=len(messages))
        return out

    def parse(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ParsedReply:
        """See `ModelFamily.parse`."""
        stops = {tokenizer.added(token) for token in self.stop_tokens()}
        end = len(ids)
        while end and ids[end - 1] in stops:
            end -= 1
        return PARSERS[self.config.parser](tokenizer.decode(ids[:end]))

    def junction(self, sampled: Sequence[int], tokenizer: Tokenizer) -> tuple[int, list[int]]:
        """Adds what the template writes behind a stop token; the stop token too when the turn ended without one."""
        behind = [tokenizer.special(s.text) if s.special else s for s in self._behind_stop]
        added = [i for part in behind for i in ([part] if isinstance(part, int) else tokenizer.encode(part.text))]
        stops = [tokenizer.special(token) for token in self.stop_tokens()]
        return 0, added if len(sampled) and sampled[-1] in stops else [stops[0], *added]

    def stop_tokens(self) -> tuple[str, ...]:
        """Raises `ModelError` when neither config nor tokenizer names one."""
        if self.config.stop:
            return self.config.stop
        eos = self._tokenizer.special_tokens.get("eos_token")
        if eos is None:
            raise ModelError(f"{self._tokenizer.source}: no eos token; set [model.family] stop")
        return (eos,)

    @functools.cached_property
    def _tokenizer(self) -> FileTokenizer:
        return load_tokenizer(self.config.directory)

    @functools.cached_property
    def _template(self) -> Any:
        name, templates = self.config.template, self._tokenizer.chat_templates
        if name.endswith(".jinja"):
            return compile_template(Path(name).read_text(encoding="utf-8"), name)
        if name not in templates:
            raise ModelError(
                f"{self.config.directory}: no chat template {name!r}; it has {', '.join(sorted(templates)) or 'none'}"
            )
        return compile_template(templates[name], f"{self.config.directory} ({name})")

    @functools.cached_property
    def _tokens(self) -> re.Pattern[str]:
        """Any added token, the longest first. A token of one character cannot be broken up, so it stays text."""
        names = sorted((n for n in self._tokenizer.added_tokens if len(n) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @functools.cached_property
    def _behind_stop(self) -> list[Segment]:
        """What the template puts between a stop token and the next message: the end of a probe's last message."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        segments = self.segments(probe)
        for position in reversed(range(len(segments))):
            if segments[position].special and segments[position].text in self.stop_tokens():
                return segments[position + 1 :]
        raise ModelError(
            f"{self.config.directory}: the chat template ends an assistant's message without any of the stop tokens "
            f"{', '.join(self.stop_tokens())}; set [model.family] stop"
        )

    @staticmethod
    def _cuts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Lengths of the prefixes to render: all but those that end inside a run of tool results."""
        roles = [message.get("role") for message in messages]
        return [n for n in range(1, len(roles) + 1) if n == len(roles) or roles[n - 1 : n + 1] != ["tool", "tool"]]

    def _added(
        self, before: str, after: str, guard: str, *, role: str, message: int, sampled: bool = False
    ) -> list[Segment]:
        """Segments of what `after` adds to `before`."""
        if not after.startswith(before):
            raise ValueError(
                f"message {message} ({role}): the chat template of {self.config.directory} renders what came before it "
                "in another way once it is there, so tokens already sampled would change; choose a model family "
                "written for this model"
            )
        return self._split(after[len(before) :], guard, role=role, message=message, sampled=sampled)

    def _split(self, text: str, guard: str, *, role: str, message: int, sampled: bool) -> list[Segment]:
        """Rendered text as segments. Behind the last stop token nothing was sampled."""
        out: list[Segment] = []
        position = 0
        for match in self._tokens.finditer(text):
            out.append(Segment(text[position : match.start()].replace(guard, ""), role=role, message=message))
            out.append(Segment(match[0], special=True, role=role, message=message))
            position = match.end()
        out.append(Segment(text[position:].replace(guard, ""), role=role, message=message))
        out = [segment for segment in out if segment.text]
        if not sampled:
            return out
        stops = [i for i, segment in enumerate(out) if segment.special and segment.text in self.stop_tokens()]
        end = stops[-1] + 1 if stops else len(out)
        return [
            Segment(s.text, special=s.special, role=s.role, message=s.message, sampled=i < end)
            for i, s in enumerate(out)
        ]

    def _guard(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """A character that no text has."""
        seen = set(json.dumps([list(messages), list(tools)], ensure_ascii=False, default=str))
        return next(character for character in _PRIVATE_USE if character not in seen)

    def _shield(self, message: Mapping[str, Any], guard: str) -> Any:
        """The message with every spelled token broken up. An assistant may spell tokens that are not special
        (`</think>`): templates look for them."""
        special_only = message.get("role") == "assistant"
        return _map_text(dict(message), functools.partial(self._break_up, guard=guard, special_only=special_only))

    def _break_up(self, text: str, *, guard: str, special_only: bool = False) -> str:
        special = self._tokenizer.special_names

        def broken(match: re.Match[str]) -> str:
            return match[0] if special_only and match[0] not in special else f"{match[0][0]}{guard}{match[0][1:]}"

        return self._tokens.sub(broken, text)

    def _render(self, messages: Sequence[Any], tools: Sequence[Any], *, generate: bool) -> str:
        import jinja2

        variables = {**self._tokenizer.special_tokens, **self.config.arguments}
        try:
            text: str = self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=generate, **variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template of {self.config.directory} refuses {len(messages)} messages: {error}"
            ) from error
        return text


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` made to every string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    return value


@functools.cache
def _generation_tag() -> type[Any]:
    """`{% generation %}`, by which templates for training mark what an assistant says; it changes no text."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser

    class GenerationTag(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def compile_template(source: str, name: str) -> Any:
    """A chat template in the environment that transformers gives it, sandboxed and immutable.

    Raises `ModelError` for a template that is no Jinja.
    """
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> str:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _generation_tag()]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat template of {name}, line {error.lineno}: {error.message}") from error
