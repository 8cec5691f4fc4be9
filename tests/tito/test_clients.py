"""The real SDKs, unmodified, through two turns with parallel tool calls over every dialect, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_core.data.tokenizer import FileTokenizer
from miles_core.engines.pool import EnginePool
from miles_core.errors import EngineUnavailable
from miles_core.testing.stub_engine import StubEngine, stub_engine
from miles_core.tito.export import Identity, export
from tests.tito.serving import Engine, Serving, serving, user

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
# Spelled as no client would write it again.
CALLS = ['{"a": 1.0,"b" :"\\u00e9"}', '{"a": 2}']
FIRST = "Let me see.\n" + "\n".join(
    f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>' for arguments in CALLS
)
LAST = "It is 3. é中"


async def chat(s: Serving, stream: bool) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{s.base}/v1", api_key=s.session.token, max_retries=0) as client:
        tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
        messages: list[Any] = [{"role": "system", "content": "Add."}, user("1 + 2")]
        seen = []
        for _ in range(2):
            if stream:
                options = {"include_usage": True}
                async with client.chat.completions.stream(
                    model="m", messages=messages, tools=tools, stream_options=options
                ) as events:
                    async for _event in events:
                        pass
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            message = answer.choices[0].message
            calls = message.tool_calls or []
            assert answer.choices[0].finish_reason == ("tool_calls" if calls else "stop")
            seen.append((message.content, [json.loads(c.function.arguments) for c in calls], answer.usage.total_tokens))
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in calls]
        return seen


async def responses(s: Serving, stream: bool) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{s.base}/v1", api_key=s.session.token, max_retries=0) as client:
        tools = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
        items: list[Any] = [user("1 + 2")]
        seen = []
        for _ in range(2):
            asked = {"model": "m", "input": items, "tools": tools, "instructions": "Add."}
            if stream:
                async with client.responses.stream(**asked) as events:
                    async for _event in events:
                        pass
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            calls = [item for item in answer.output if item.type == "function_call"]
            seen.append((answer.output_text, [json.loads(c.arguments) for c in calls], answer.usage.total_tokens))
            items += [i.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for i in answer.output]
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in calls]
        return seen


async def messages(s: Serving, stream: bool) -> list[Any]:
    async with anthropic.AsyncAnthropic(base_url=s.base, api_key=s.session.token, max_retries=0) as client:
        tools = [{"name": "add", "input_schema": PARAMETERS}]
        system = [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]
        history: list[Any] = [user("1 + 2")]
        seen = []
        for _ in range(2):
            asked = {"model": "m", "messages": history, "tools": tools, "system": system, "max_tokens": 300}
            if stream:
                async with client.messages.stream(**asked) as events:
                    async for _event in events:
                        pass
                    answer = await events.get_final_message()
            else:
                answer = await client.beta.messages.create(**asked)  # posts to ?beta=true
            calls = [block for block in answer.content if block.type == "tool_use"]
            text = "".join(block.text for block in answer.content if block.type == "text")
            assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            counted = answer.usage.input_tokens + answer.usage.output_tokens
            seen.append((text, [c.input for c in calls], counted))
            history.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": "1"} for c in calls]
            counting = await client.messages.count_tokens(
                model="m", messages=[*history[:-1]], tools=tools, system=system
            )
            assert counting.input_tokens == answer.usage.input_tokens
            history.append({"role": "user", "content": results})
        return seen


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", [chat, responses, messages])
async def test_two_turns_with_parallel_calls(tokenizer: FileTokenizer, client: Any, stream: bool):
    end = tokenizer.special("<|im_end|>")
    said = iter([FIRST, LAST])
    stub = StubEngine(lambda ids, params: [*tokenizer.encode(next(said)), end])
    stub.stream_interval = 3
    async with stub_engine(stub) as url:
        pool = EnginePool([url])
        try:
            async with serving(pool, tokenizer) as s:
                seen = await client(s, stream)
                (trajectory,) = export(s.session.tree, Identity(prompt_id="p", group_id="g", episode_id="e"))
        finally:
            await pool.close()
    assert [(text, calls) for text, calls, _ in seen] == [
        ("Let me see.", [{"a": 1.0, "b": "é"}, {"a": 2}]),
        (LAST, []),
    ]
    assert len(trajectory) == seen[1][2]  # every token is counted, and one branch holds both turns
    assert tokenizer.decode(trajectory.token_ids[trajectory.loss_mask].tolist(), skip_special=True) == FIRST + LAST
    for turn, asked in zip(trajectory.turns, stub.requests, strict=True):
        assert asked["input_ids"] == trajectory.token_ids[: turn.start].tolist()


async def test_previous_response_id_continues(tokenizer: FileTokenizer):
    async with (
        serving(Engine(tokenizer, "one", "two"), tokenizer) as s,
        openai.AsyncOpenAI(base_url=f"{s.base}/v1", api_key=s.session.token, max_retries=0) as client,
    ):
        first = await client.responses.create(model="m", input="hello")
        second = await client.responses.create(model="m", input="more", previous_response_id=first.id)
        assert second.output_text == "two"
        assert [leaf.turns for leaf in s.session.tree.leaves()] == [2]
        with pytest.raises(openai.BadRequestError, match="no turn"):
            await client.responses.create(model="m", input="more", previous_response_id="resp_other")


async def test_errors_are_the_sdks_own(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, EngineUnavailable("no engine")), tokenizer) as s:
        wrong = anthropic.AsyncAnthropic(base_url=s.base, api_key="nobody", max_retries=0)
        right = openai.AsyncOpenAI(base_url=f"{s.base}/v1", api_key=s.session.token, max_retries=0)
        async with wrong, right:
            with pytest.raises(anthropic.AuthenticationError):
                await wrong.messages.create(model="m", messages=[user("x")], max_tokens=5)
            with pytest.raises(openai.InternalServerError, match="no engine"):
                await right.chat.completions.create(model="m", messages=[user("x")])
            with pytest.raises(openai.BadRequestError, match="logit_bias"):
                await right.chat.completions.create(model="m", messages=[user("x")], logit_bias={"1": 1})
