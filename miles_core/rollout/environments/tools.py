"""A loop of turns in which the model calls Python functions."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.environments import EpisodeTask, GenerateEnvironment
from miles_core.data.group import Episode
from miles_core.data.segments import encode_segments, suffix_segments
from miles_core.data.trajectory import Status
from miles_core.errors import ConfigError, EnvironmentFailure, Problem
from miles_core.rollout.environments.single_turn import generation_metrics, sampling_of_turn
from miles_core.rollout.functions import load_function
from miles_core.rollout.recorder import TrajectoryRecorder, status_of

if TYPE_CHECKING:
    from miles_core.contracts.engines import EngineClient, Generation

__all__ = ["Tool", "ToolLoop", "ToolLoopConfig", "describe"]


class ToolLoopConfig(ComponentConfig):
    """Section `[environment]` of `tools`."""

    tools: tuple[str, ...] = Field(min_length=1)
    """Functions that the model may call: `module:function` or `path/to/file.py:function`. Their signatures and
    docstrings make the JSON schemas that the model sees."""
    max_turns: int = Field(default=8, ge=1)
    """Most generations of an episode; one that still calls a tool in the last of them is `truncated`."""
    tool_timeout: float = Field(default=30.0, gt=0)
    """Seconds for one call, after which the model reads that it timed out."""
    max_result_chars: int = Field(default=20_000, ge=1)
    """Longer results are cut, and say so."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A callable, what the model is told of it, and the model of its arguments."""

    name: str
    schema: Mapping[str, Any]
    arguments: type[BaseModel]
    function: Callable[..., Any]


def describe(function: Callable[..., Any]) -> Tool:
    """The tool of a function: name, docstring and typed parameters as a Chat Completions tool object.

    Raises `TypeError` for positional-only and star parameters, which JSON arguments cannot fill.
    """
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {function.__name__}: parameter {parameter} cannot be filled by name")
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (annotation, default)
    model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    schema = {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": inspect.getdoc(function) or "",
            "parameters": model.model_json_schema(),
        },
    }
    return Tool(name=function.__name__, schema=schema, arguments=model, function=function)


class ToolLoop(GenerateEnvironment[ToolLoopConfig]):
    """Generates, runs the calls of a reply side by side, appends the results, generates again.

    Only what is new is tokenised: the family's junction, the results, the next header. Sampled tokens stay as they
    were sampled. An async tool is cancelled at the timeout; any other runs in a thread that nothing can stop, so it
    has to end by itself. What a tool raises is told to the model, except `EnvironmentFailure`, which fails the episode.
    A row's own `tools` restrict what is offered to those.
    """

    Config = ToolLoopConfig

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """One tool."""
        path = bench.directory / "add.py"
        path.write_text(
            'def add(a: int, b: int) -> int:\n    """Add two integers."""\n    return a + b\n', encoding="utf-8"
        )
        return Example(settings={"tools": (f"{path}:add",)})

    def __init__(self, config: ToolLoopConfig) -> None:
        super().__init__(config)
        self._tools: dict[str, Tool] = {}
        for reference in config.tools:
            tool = describe(load_function(reference, key="environment.tools"))
            if tool.name in self._tools:
                problem = Problem(
                    key="environment.tools",
                    value=reference,
                    message=f"two tools are named {tool.name}",
                    hint="rename one",
                )
                raise ConfigError([problem])
            self._tools[tool.name] = tool

    async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
        """See `GenerateEnvironment.generate`."""
        offered = self._offered(task)
        messages: list[Mapping[str, Any]] = list(task.prompt.messages)
        recorder = TrajectoryRecorder(task)
        recorder.append_prompt(self.family.render(messages, self.tokenizer, tools=offered, add_generation_prompt=True))
        names = {tool["function"]["name"] for tool in offered}
        generations: list[Generation] = []
        tool_seconds = 0.0
        while True:
            sampling = sampling_of_turn(task, recorder, self.family, self.tokenizer)
            if sampling is None:
                status = Status.TRUNCATED
                break
            generation = await engine.generate(
                recorder.ids, sampling, routing_key=task.episode_id, priority=task.priority
            )
            recorder.append_generation(generation)
            generations.append(generation)
            reply = self.family.parse(generation.token_ids.tolist(), self.tokenizer, tools=offered)
            calls = [{"id": f"call_{len(generations)}_{i}", **call} for i, call in enumerate(reply.tool_calls)]
            messages.append(dataclasses.replace(reply, tool_calls=tuple(calls)).as_message())
            status = status_of(generation.finish_reason)
            if status is not Status.COMPLETED or not calls:
                break
            if len(generations) == self.config.max_turns:
                status = Status.TRUNCATED
                break
            begin = time.perf_counter()
            results = await asyncio.gather(*(self._run(call["function"], names) for call in calls))
            tool_seconds += time.perf_counter() - begin
            answered = len(messages) - 1
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
            recorder.join(*self.family.junction(generation.token_ids.tolist(), self.tokenizer))
            segments = self.family.segments(messages, tools=offered, add_generation_prompt=True)
            recorder.append_prompt(encode_segments(suffix_segments(segments, after=answered), self.tokenizer)[0])
        trajectory = recorder.build(status)
        return Episode(
            episode_id=task.episode_id,
            prompt_id=task.prompt.prompt_id,
            group_id=task.group_id,
            status=trajectory.status,
            trajectories=(trajectory,),
            metrics=generation_metrics(generations) | {"tool_seconds": tool_seconds},
            messages=tuple(messages),
        )

    def _offered(self, task: EpisodeTask) -> Sequence[Mapping[str, Any]]:
        if not task.prompt.tools:
            return [tool.schema for tool in self._tools.values()]
        names = [tool.get("function", tool).get("name") for tool in task.prompt.tools]
        unknown = sorted(str(name) for name in names if name not in self._tools)
        if unknown:
            raise EnvironmentFailure(
                f"prompt {task.prompt.prompt_id} offers the tools {', '.join(unknown)}, which [environment] tools "
                f"lacks; it has {', '.join(self._tools)}"
            )
        return [self._tools[name].schema for name in names]

    async def _run(self, call: Mapping[str, Any], names: set[str]) -> str:
        """What the model reads as the result of a call."""
        tool = self._tools.get(call["name"])
        if tool is None or tool.name not in names:
            return f"Error: there is no tool {call['name']}; there are {', '.join(sorted(names))}"
        try:
            arguments = tool.arguments.model_validate_json(call["arguments"])
        except ValidationError as error:
            return f"Error: {error}"
        values = {name: getattr(arguments, name) for name in tool.arguments.model_fields}
        try:
            async with asyncio.timeout(self.config.tool_timeout):
                result = await _call(tool.function, values)
        except TimeoutError:
            return f"Error: {tool.name} did not finish within {self.config.tool_timeout:g} s"
        except EnvironmentFailure:
            raise
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}"
        text = result if isinstance(result, str) else orjson.dumps(result, default=str).decode()
        limit = self.config.max_result_chars
        return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters were cut]"


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Awaitable[Any]:
    if inspect.iscoroutinefunction(function):
        awaitable: Awaitable[Any] = function(**arguments)
        return awaitable
    return asyncio.to_thread(function, **arguments)
