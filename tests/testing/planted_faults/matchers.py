"""Faults of message matchers."""

from __future__ import annotations

import json
import os

from planted_faults import scaffolded

Good = scaffolded("message_matchers")
GOOD = (Good,)


class Short(Good):
    """Eight bytes."""

    def digest(self, message):
        return super().digest(message)[:8]


class Text(Good):
    """Text for bytes."""

    def digest(self, message):
        return super().digest(message).hex()


class Ordered(Good):
    """Sees the order of keys."""

    def digest(self, message):
        return json.dumps(message).encode().ljust(16)


class Salted(Good):
    """Another instance, another digest."""

    def __init__(self, config):
        super().__init__(config)
        self.salt = os.urandom(4)

    def digest(self, message):
        return self.salt + super().digest(message)


class SeesNull(Good):
    """null and "" are two things."""

    def digest(self, message):
        return json.dumps(message, sort_keys=True).encode().ljust(16)


class RoleOnly(Good):
    """Every message of a role is one."""

    merges_histories = True

    def digest(self, message):
        return super().digest({"role": message["role"]})


class ContentOnly(Good):
    """Whoever says it."""

    merges_histories = True

    def digest(self, message):
        return super().digest({"content": message.get("content")})


class HidesCalls(Good):
    """Ignores calls, and does not say so."""

    def digest(self, message):
        return super().digest({**message, "tool_calls": None})


class HidesReasoning(Good):
    """Ignores reasoning, and does not say so."""

    def digest(self, message):
        return super().digest({**message, "reasoning_content": None})


class Parses(Good):
    """Believes that arguments are JSON objects."""

    def digest(self, message):
        for call in message.get("tool_calls") or ():
            dict(json.loads(call["function"]["arguments"]))
        return super().digest(message)


FAULTS = {
    "digest_is_bytes_and_repeatable": (Short, Text, Ordered, Salted),
    "nothing_said_is_nothing": (SeesNull,),
    "different_content_differs": (RoleOnly, ContentOnly),
    "merging_is_declared": (HidesCalls, HidesReasoning),
    "malformed_arguments_are_text": (Parses,),
}
