"""Laws of message matchers: a digest is a function of what was said, and of nothing else.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

from typing import Any

from miles_core.testing.kit import Case, Check

__all__ = ["CHECKS"]

CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "", "reasoning_content": "2 + 2"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
)


def digest_is_bytes_and_repeatable(case: Case) -> None:
    matcher, other = case.create(), case.create()
    for message in MESSAGES:
        digest = matcher.digest(message)
        assert isinstance(digest, bytes), f"digest is {type(digest).__name__}, expected bytes"
        assert len(digest) >= 16, f"digest has {len(digest)} bytes, expected at least 16: shorter ones collide"
        shuffled = dict(reversed(list(message.items())))
        assert digest == matcher.digest(shuffled) == other.digest(message), (
            f"equal messages get different digests (order of keys, another instance): {message}"
        )


def nothing_said_is_nothing(case: Case) -> None:
    digest = case.create().digest
    calls: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    nothings: tuple[Any, ...] = (None, "", [])
    for empty in nothings:
        assert digest({**calls, "content": empty}) == digest(calls), f'content {empty!r} and "" get different digests'
    said = {"role": "assistant", "content": "4"}
    for key in ("tool_calls", "reasoning_content"):
        for nothing in nothings:
            assert digest({**said, key: nothing}) == digest(said), (
                f"{key} {nothing!r} and no {key} get different digests: clients send either"
            )


def different_content_differs(case: Case) -> None:
    digest = case.create().digest
    for role in ("system", "user", "assistant", "tool"):
        a, b = {"role": role, "content": "4"}, {"role": role, "content": "5"}
        assert digest(a) != digest(b), f"two {role} messages that say different things get one digest"
    assert digest({"role": "user", "content": "4"}) != digest({"role": "assistant", "content": "4"}), (
        "a user's and an assistant's message get one digest"
    )


def merging_is_declared(case: Case) -> None:
    matcher = case.create()
    changed = {**CALL, "function": {"name": "add", "arguments": '{"a": 2}'}}
    renamed = {**CALL, "function": {"name": "sub", "arguments": '{"a": 1}'}}
    base = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for what, other in (
        ("arguments of a call", {**base, "tool_calls": [changed]}),
        ("function of a call", {**base, "tool_calls": [renamed]}),
        ("reasoning", {**base, "reasoning_content": "because"}),
    ):
        assert matcher.merges_histories or matcher.digest(base) != matcher.digest(other), (
            f"messages that differ in the {what} get one digest, and merges_histories is false"
        )


def malformed_arguments_are_text(case: Case) -> None:
    matcher = case.create()
    for arguments in ("{", "", "[1]", "nan", '{"a": 1} trailing'):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        try:
            matcher.digest({"role": "assistant", "content": None, "tool_calls": [call]})
        except Exception as error:
            raise AssertionError(f"tool arguments {arguments!r} raise {type(error).__name__}: {error}") from error


CHECKS: tuple[Check, ...] = (
    digest_is_bytes_and_repeatable,
    nothing_said_is_nothing,
    different_content_differs,
    merging_is_declared,
    malformed_arguments_are_text,
)
