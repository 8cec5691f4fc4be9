"""Tools of the Responses dialect: what the policy is offered, and how its calls go back to the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_core.contracts.engines import Sampling
from miles_core.data.tokenizer import FileTokenizer
from miles_core.testing.scripted_policy import read_prompt, tool_call
from tests.tito.serving import Engine, serving, user

openai = pytest.importorskip("openai")

FUNCTION = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Patch a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "team",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}, {**CUSTOM, "name": "tell"}],
}
HOSTED = {"type": "web_search"}
TOOLS: list[Any] = [FUNCTION, CUSTOM, NAMESPACE, HOSTED]
SAID = "\n".join(
    [
        tool_call("add", a=1),
        tool_call("patch", input="é\n*** End"),
        tool_call("team__spawn", task="x"),
        tool_call("team__tell", input="hello"),
        tool_call("patch", input=3),
        tool_call("patch", text="no such argument"),
    ]
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_client_tools_of_every_kind(tokenizer: FileTokenizer, stream: bool):
    engine = Engine(tokenizer, SAID, "Done.")
    async with (
        serving(engine, tokenizer, sampling=Sampling(max_new_tokens=2000)) as s,
        openai.AsyncOpenAI(base_url=f"{s.base}/v1", api_key=s.session.token, max_retries=0) as client,
    ):
        items: list[Any] = [user("go")]
        if stream:
            async with client.responses.stream(model="m", input=items, tools=TOOLS) as events:
                names = [event.type async for event in events]
                answer = await events.get_final_response()
            assert names.count("response.custom_tool_call_input.done") == 2
            assert names.count("response.function_call_arguments.done") == 4
        else:
            answer = await client.responses.create(model="m", input=items, tools=TOOLS)
        calls = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        items += calls
        items += [{"type": f"{c['type']}_output", "call_id": c["call_id"], "output": "ok"} for c in calls]
        last = await client.responses.create(model="m", input=items, tools=TOOLS)
        assert [leaf.turns for leaf in s.session.tree.leaves()] == [2]
    assert last.output_text == "Done."
    assert [(c["type"], c.get("namespace"), c["name"]) for c in calls] == [
        ("function_call", None, "add"),
        ("custom_tool_call", None, "patch"),
        ("function_call", "team", "spawn"),
        ("custom_tool_call", "team", "tell"),
        ("function_call", None, "patch"),
        ("function_call", None, "patch"),
    ]
    assert [c["input"] for c in calls if "input" in c] == ["é\n*** End", "hello"]
    assert [json.loads(c["arguments"]) for c in calls if "arguments" in c] == [
        {"a": 1},
        {"task": "x"},
        {"input": 3},
        {"text": "no such argument"},
    ]
    read = read_prompt(tokenizer.decode(engine.asked[1][0]))
    assert list(read.tools) == ["add", "patch", "team__spawn", "team__tell"]
    assert read.tools["patch"]["required"] == ["input"]
    assert "start: /.+/" in read.messages[0][1]
    assert read.results == ("ok",) * 6


async def test_two_tools_of_one_name_are_refused(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "x"), tokenizer) as s:
        tools = [{**FUNCTION, "name": "team__spawn"}, NAMESPACE]
        status, answer = await s.post("v1/responses", {"model": "m", "input": "x", "tools": tools})
    assert status == 400
    assert "team__spawn" in answer["error"]["message"]


async def test_a_custom_call_that_utf8_cannot_carry_stays_as_it_was_sampled(tokenizer: FileTokenizer):
    said = '<tool_call>\n{"name": "patch", "arguments": {"input": "\\ud800"}}\n</tool_call>'
    async with serving(Engine(tokenizer, said), tokenizer) as s:
        status, answer = await s.post("v1/responses", {"model": "m", "input": "x", "tools": [CUSTOM]})
    assert status == 200
    assert [(i["type"], i["arguments"]) for i in answer["output"]] == [("function_call", '{"input": "\\ud800"}')]
