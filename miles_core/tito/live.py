"""The laws of a family on ids that an engine truly sampled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.contracts.engines import EngineClient, Sampling
from miles_core.contracts.families import ModelFamily, Tokenizer
from miles_core.data.segments import encode_segments
from miles_core.tito.verify import TOOLS, Finding, Verdict, check_reply, conversations, takes

__all__ = ["LiveVerdict", "verify_live"]

Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LiveVerdict(Verdict):
    """`tokens`: sampled in all. `respelled`: replies whose ids are not those that their message is rendered to; a
    session keeps the sampled ones. `unfinished`: replies that ended at the limit; a conversation ends there."""

    tokens: int
    respelled: int
    unfinished: int


async def verify_live(
    family: ModelFamily[Any],
    tokenizer: Tokenizer,
    engine: EngineClient,
    *,
    count: int,
    seed: int = 0,
    special: Sequence[str] = (),
    max_new_tokens: int = 64,
    temperature: float = 1.0,
) -> LiveVerdict:
    """Hold `count` generated conversations with a live engine: each assistant's message is what the engine samples.

    Beside the laws of `verify`: the engine counts the prompt tokens that were sent, a finished reply ends with a stop
    token of the family, and what a session holds after each turn is what the next prompt starts with: where a reply's
    ids are those of its rendering, the rendering of the whole conversation. Raises the engine's `EngineError`.
    """
    broken: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    first: dict[str, Finding] = {}
    stops = tuple(tokenizer.special(token) for token in family.stop_tokens())
    reasoning = takes(family, {"role": "assistant", "content": "b", "reasoning_content": "c"})
    for number, (script, offered) in enumerate(conversations(count, seed=seed, special=special, reasoning=reasoning)):
        tools = TOOLS if offered else ()
        messages: Messages = []
        held: list[int] = []
        sampled: list[int] = []
        exact = True

        def note(law: str, detail: str, said: Messages) -> None:
            broken[law] += 1
            first.setdefault(law, Finding(law=law, detail=detail, messages=list(said)))

        for message in script:
            if message["role"] != "assistant":
                answers = messages and (messages[-1].get("tool_calls") or messages[-1]["role"] == "tool")
                role = "user" if message["role"] == "tool" and not answers else message["role"]
                messages.append({**message, "role": role})
                continue
            prompt = _prompt(family, tokenizer, messages, held, sampled, tools)
            whole = family.render(messages, tokenizer, tools=tools, add_generation_prompt=True)
            if exact and prompt != whole:
                note(
                    "append-only",
                    f"what is held and the suffix are not the prompt for message {len(messages)}",
                    messages,
                )
            sampling = Sampling(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop_token_ids=stops,
                seed=seed + number * 1000 + len(messages),
            )
            generation = await engine.generate(prompt, sampling, routing_key=f"verify-{number}")
            sampled = generation.token_ids.tolist()
            if generation.prompt_tokens != len(prompt):
                note("prompt tokens", f"{len(prompt)} were sent, {generation.prompt_tokens} counted", messages)
            if (generation.finish_reason == "stop") != bool(sampled and sampled[-1] in stops):
                ended = sampled[-1:] if sampled else "nothing"
                note("stop token", f"the reply ended with {ended} for the reason {generation.finish_reason}", messages)
            for law, detail in check_reply(family, tokenizer, messages, sampled, tools, seen):
                note(law, detail, messages)
            seen["tokens"] += len(sampled)
            reply = family.parse(sampled, tokenizer, tools=tools).as_message()
            at = len(messages)
            again = [s for s in family.segments([*messages, reply], tools=tools) if s.message == at and s.sampled]
            exact_reply = encode_segments(again, tokenizer)[0] == sampled
            seen["respelled"] += not exact_reply
            exact = exact and exact_reply
            messages.append(reply)
            held = prompt
            if generation.finish_reason != "stop":
                seen["unfinished"] += 1
                break
    return LiveVerdict(
        conversations=count,
        refused=0,
        broken=dict(broken),
        findings=tuple(first.values()),
        replies=seen["replies"],
        calls=seen["calls"],
        malformed=seen["malformed"],
        tokens=seen["tokens"],
        respelled=seen["respelled"],
        unfinished=seen["unfinished"],
    )


def _prompt(
    family: ModelFamily[Any],
    tokenizer: Tokenizer,
    messages: Messages,
    held: Sequence[int],
    sampled: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    """The prompt as a session makes it: what it holds, the sampled ids, the junction, and the suffix alone."""
    after = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if after < 0:
        return family.render(messages, tokenizer, tools=tools, add_generation_prompt=True)
    drop, add = family.junction(sampled, tokenizer)
    rest = encode_segments(family.suffix(messages, after=after, tools=tools), tokenizer)[0]
    return [*held, *sampled[: len(sampled) - drop], *add, *rest]
