"""What a chat template does to history, as text: which conversations it renders in another way once they go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.errors import ModelError
from miles_core.tito.families.template import compile_template

__all__ = ["PROBES", "Probe", "probe_template", "templates_in"]

_U1, _U2 = {"role": "user", "content": "U1"}, {"role": "user", "content": "U2"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

PROBES: Mapping[str, list[dict[str, Any]]] = {
    "plain": [_U1, {"role": "assistant", "content": "A1"}, _U2],
    "reasoning": [_U1, {"role": "assistant", "content": "A1", "reasoning_content": "R1"}, _U2],
    "tool call": [
        _U1,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "A1"},
        _U2,
    ],
}
"""Conversations in which a template may change what it wrote: the three ways that training met."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """`word` is `yes`, `no`, or `refuses` when the template raises on every probe; `detail` names what breaks it."""

    word: str
    detail: str


def probe_template(source: str, name: str) -> Probe:
    """Render every probe at every cut behind an assistant's message, and compare with the whole."""
    import jinja2

    try:
        template = compile_template(source, name)
    except ModelError as error:
        return Probe(word="refuses", detail=str(error))
    broken, refused = [], []
    for kind, messages in PROBES.items():
        try:
            found = _unstable(template, messages)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            refused.append(f"{kind}: refused ({error})")
            continue
        if found:
            broken.append(f"{kind}: {found}")
    word = "refuses" if len(refused) == len(PROBES) else "no" if broken else "yes"
    return Probe(word=word, detail="; ".join([*broken, *refused]))


def _unstable(template: Any, messages: list[dict[str, Any]]) -> str:
    """What of an assistant's message the whole conversation no longer shows; empty when it is a prefix."""
    variables = {"bos_token": "<bos>", "eos_token": "<eos>", "tools": None}
    whole = template.render(messages=messages, add_generation_prompt=False, **variables)
    for cut, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        part = template.render(messages=messages[:cut], add_generation_prompt=False, **variables).rstrip("\n")
        if not whole.startswith(part):
            at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), len(whole))
            return f"{part[at : at + 24]!r} becomes {whole[at : at + 24]!r} when the conversation goes on"
    return ""


def templates_in(path: Path) -> Iterator[tuple[str, str]]:
    """(name, source) of a template file, of every .jinja file of a directory, or of a tokenizer directory."""
    if path.is_file():
        yield path.stem, path.read_text(encoding="utf-8")
        return
    if (path / "tokenizer.json").is_file():
        from miles_core.data.tokenizer import load_tokenizer

        yield from sorted(load_tokenizer(path).chat_templates.items())
        return
    for file in sorted(path.glob("*.jinja")):
        yield file.stem, file.read_text(encoding="utf-8")
