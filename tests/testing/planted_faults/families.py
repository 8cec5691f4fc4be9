"""Faults of model families."""

from __future__ import annotations

import dataclasses

from miles_core.contracts.families import ParsedReply, Segment
from miles_core.tito.families.chatml import ChatMLFamily
from miles_core.tito.families.template import TemplateFamily
from planted_faults import scaffolded

Good = scaffolded("model_families")
GOOD = (Good, ChatMLFamily, TemplateFamily)


class ForgetsThinking(Good):
    """Renders earlier replies without their first line, as templates of reasoning models do."""

    def segments(self, messages, *, tools=(), add_generation_prompt=False):
        last = len(messages) - 1
        shown = [
            {**m, "content": m["content"].split("\n")[-1]} if m["role"] == "assistant" and i < last else m
            for i, m in enumerate(messages)
        ]
        return super().segments(shown, tools=tools, add_generation_prompt=add_generation_prompt)


class CountsMessages(Good):
    """The first token tells how long the conversation is."""

    def segments(self, messages, *, tools=(), add_generation_prompt=False):
        head = Segment(f"{len(messages)}\n", role="system", message=-1)
        return [head, *super().segments(messages, tools=tools, add_generation_prompt=add_generation_prompt)]


class NoNewline(Good):
    """Its junction forgets the newline behind the stop token."""

    def junction(self, sampled, tokenizer):
        return 0, []


class Strips(Good):
    """White space around a reply is lost."""

    def parse(self, ids, tokenizer, *, tools=()):
        return ParsedReply(content=super().parse(ids, tokenizer, tools=tools).content.replace("\n", " "))


class SeesCalls(Good):
    """Braces are taken for calls."""

    def parse(self, ids, tokenizer, *, tools=()):
        reply = super().parse(ids, tokenizer, tools=tools)
        call = {"type": "function", "function": {"name": "c", "arguments": "{}"}}
        return dataclasses.replace(reply, tool_calls=(call,) if "{" in reply.content else ())


class NoStop(Good):
    """Never ends a turn."""

    def stop_tokens(self):
        return ()


class OtherStop(Good):
    """Stops at a token that it does not write."""

    def stop_tokens(self):
        return ("<|endoftext|>",)


class SamplesAll(Good):
    """Says that the user's words were sampled."""

    def segments(self, messages, *, tools=(), add_generation_prompt=False):
        made = super().segments(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return [dataclasses.replace(segment, sampled=True) for segment in made]


class Spells(Good):
    """Text that spells a special token becomes one."""

    def segments(self, messages, *, tools=(), add_generation_prompt=False):
        out = []
        for segment in super().segments(messages, tools=tools, add_generation_prompt=add_generation_prompt):
            if segment.special or "<|im_end|>" not in segment.text:
                out.append(segment)
                continue
            for number, piece in enumerate(segment.text.split("<|im_end|>")):
                out += [dataclasses.replace(segment, text="<|im_end|>", special=True)] if number else []
                out.append(dataclasses.replace(segment, text=piece))
        return out


class AnyRole(Good):
    """Renders whatever it is given."""

    def segments(self, messages, *, tools=(), add_generation_prompt=False):
        known = [m if m["role"] in self.config.roles else {**m, "role": "user"} for m in messages]
        return super().segments(known, tools=tools, add_generation_prompt=add_generation_prompt)


FAULTS = {
    "rendering_is_append_only_at_every_cut": (ForgetsThinking, CountsMessages),
    "junction_joins_a_reply_to_what_follows": (NoNewline,),
    "parse_inverts_render": (Strips, SeesCalls),
    "a_stop_token_ends_every_reply": (NoStop, OtherStop),
    "only_the_assistant_is_sampled": (SamplesAll,),
    "text_never_becomes_a_token": (Spells,),
    "unknown_role_is_a_value_error": (AnyRole,),
}
