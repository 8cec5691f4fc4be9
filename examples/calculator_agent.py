"""An agent with a calculator, on the openai SDK, as anybody would write it: it knows nothing of training.

`run` is one episode, `score` what it is worth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import openai

from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import Endpoint, Outcome
from miles_core.contracts.rewards import Sample
from miles_core.data.group import Prompt
from miles_core.errors import EnvironmentFailure

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates a sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(arguments: str) -> str:
    """The value of the sum in `arguments` (JSON with an `expression`), or what is wrong with it."""
    try:
        expression = json.loads(arguments)["expression"]
        terms = re.fullmatch(r"\s*-?\d{1,9}(\s*[+-]\s*\d{1,9})*\s*", expression)
    except (ValueError, TypeError, LookupError):
        return 'Error: write {"expression": "1 + 2"}'
    if terms is None:
        return "Error: only sums of whole numbers can be evaluated"
    return str(sum(int(term.replace(" ", "")) for term in re.findall(r"[+-]?\s*\d+", expression)))


def example(expression: str) -> list[dict[str, Any]]:
    """A solved question, which shows how the calculator is used."""
    arguments = json.dumps({"expression": expression})
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    result = calculate(arguments)
    return [
        {"role": "user", "content": f"State the final answer to the following arithmetic problem: {expression} ="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
        {"role": "assistant", "content": result},
    ]


async def run(
    endpoint: Endpoint, prompt: Prompt, sampling: Sampling, metadata: Mapping[str, Any], *, max_turns: int = 4
) -> Outcome:
    """Ask, run what the model calls, ask again, until it answers without a call."""
    messages: list[Any] = [*example("12 + 30"), *example("71 - 8"), *prompt.messages]
    turns = used = 0
    async with openai.AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.token) as client:
        while turns < max_turns:
            try:
                completion = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=[CALCULATOR]
                )
            except openai.BadRequestError:  # the conversation has reached the run's token limit
                return Outcome(stop_reason="truncated", metrics={"calculator_calls": float(used)})
            except openai.APIError as error:
                raise EnvironmentFailure(f"the session did not answer: {error}") from error
            turns += 1
            reply = completion.choices[0]
            messages.append(reply.message.model_dump(exclude_none=True))
            if reply.finish_reason != "tool_calls":
                break
            for call in reply.message.tool_calls or ():
                used += 1
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return Outcome(metrics={"calculator_calls": float(used)})


def score(sample: Sample) -> float:
    """1 for the right answer; 0.25 for having got it from the calculator at least."""
    label = str(sample.prompt.label)
    asked = next(i for i, m in enumerate(sample.messages) if m["content"] == sample.prompt.messages[-1]["content"])
    results = [m["content"] for m in sample.messages[asked:] if m["role"] == "tool"]
    if re.search(rf"(?<!\d){re.escape(label)}(?!\d)", sample.response):
        return 1.0
    return 0.25 if label in results else 0.0
