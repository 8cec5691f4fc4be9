"""How each agent is pointed at a session, and how a policy calls its tools: the facts of docs/howto/agents.md."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miles_core.testing.scripted_policy import ReadPrompt, tool_call
from tests.agents.harness import MODEL, Desk

CLIENTS = Path(os.environ.get("MILES_AGENT_CLIENTS", "."))
NPM = CLIENTS / "npm" / "node_modules" / ".bin"
HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
    """`command(task)` and `environment(desk, home)` start it; `read` and `write` call its tools for a path; `finish` is
    the policy's last word. `delegate` starts a sub-agent on a task, where the agent can; `wait` is what the policy says
    while that one has not answered."""

    name: str
    path: str
    command: Callable[[str], list[str]]
    environment: Callable[[Desk, Path], Mapping[str, str]]
    read: Callable[[Path], str]
    write: Callable[[Path, str], str]
    finish: str = "Done."
    delegate: Callable[[str], str] | None = None
    wait: Callable[[ReadPrompt], str] = lambda prompt: "I wait."

    def __repr__(self) -> str:
        return self.name


def _claude(desk: Desk, home: Path) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": desk.url,
        "ANTHROPIC_API_KEY": desk.session.token,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


_CODEX = """\
model = "{model}"
model_provider = "miles"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.miles]
name = "miles"
base_url = "{url}/v1"
env_key = "MILES_TOKEN"
wire_api = "responses"
"""


def _codex(desk: Desk, home: Path) -> Mapping[str, str]:
    (home / "config.toml").write_text(_CODEX.format(model=MODEL, url=desk.url))
    return {"CODEX_HOME": str(home), "MILES_TOKEN": desk.session.token}


def _openai(desk: Desk, home: Path) -> Mapping[str, str]:
    return {
        "OPENAI_BASE_URL": f"{desk.url}/v1",
        "OPENAI_API_KEY": desk.session.token,
        "OPENAI_MODEL": MODEL,
    }


def _opencode(desk: Desk, home: Path) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{desk.url}/v1", "apiKey": "{env:MILES_TOKEN}"},
        "models": {MODEL: {"name": MODEL}},
    }
    config = {"model": f"miles/{MODEL}", "autoupdate": False, "share": "disabled", "provider": {"miles": provider}}
    return {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "MILES_TOKEN": desk.session.token,
    }


def _mini(desk: Desk, home: Path) -> Mapping[str, str]:
    return {
        **_openai(desk, home),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _litellm(desk: Desk, home: Path) -> Mapping[str, str]:
    return {"MILES_URL": desk.url, "MILES_TOKEN": desk.session.token, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _shell(tool: str, argument: str) -> dict[str, Any]:
    return {
        "read": lambda path: tool_call(tool, **{argument: f"cat {path}"}),
        "write": lambda path, text: tool_call(tool, **{argument: f"printf %s {text} > {path}"}),
    }


def _through_litellm(mode: str, path: str) -> Client:
    return Client(
        name=f"litellm-{mode}",
        path=path,
        command=lambda task: [str(CLIENTS / "bin" / "python"), str(HERE / "litellm_loop.py"), mode, task],
        environment=_litellm,
        read=lambda path: tool_call("read", path=str(path)),
        write=lambda path, text: tool_call("write", path=str(path), text=text),
    )


ALL = [
    Client(
        name="claude-code",
        path="v1/messages",
        command=lambda task: [str(NPM / "claude"), "-p", task, "--permission-mode", "acceptEdits"],
        environment=_claude,
        read=lambda path: tool_call("Read", file_path=str(path)),
        write=lambda path, text: tool_call("Write", file_path=str(path), content=text),
        delegate=lambda task: tool_call("Agent", description="Read", prompt=task, subagent_type="general-purpose"),
    ),
    Client(
        name="codex",
        path="v1/responses",
        command=lambda task: [str(NPM / "codex"), "exec", "--skip-git-repo-check", task],
        environment=_codex,
        **_shell("exec_command", "cmd"),
        delegate=lambda task: tool_call("multi_agent_v1__spawn_agent", message=task),
        wait=lambda prompt: tool_call(
            "multi_agent_v1__wait_agent", targets=[json.loads(prompt.results[0])["agent_id"]], timeout_ms=60000
        ),
    ),
    Client(
        name="qwen-code",
        path="v1/chat/completions",
        command=lambda task: [str(NPM / "qwen"), "--auth-type", "openai", "--yolo", "-p", task],
        environment=_openai,
        read=lambda path: tool_call("read_file", file_path=str(path)),
        write=lambda path, text: tool_call("write_file", file_path=str(path), content=text),
        delegate=lambda task: tool_call("agent", description="Read", prompt=task, subagent_type="general-purpose"),
    ),
    Client(
        name="opencode",
        path="v1/chat/completions",
        command=lambda task: [str(NPM / "opencode"), "run", task],
        environment=_opencode,
        read=lambda path: tool_call("read", filePath=str(path)),
        write=lambda path, text: tool_call("write", filePath=str(path), content=text),
        delegate=lambda task: tool_call("task", description="Read", prompt=task, subagent_type="general"),
    ),
    Client(
        name="mini-swe-agent",
        path="v1/chat/completions",
        command=lambda task: [
            *(str(CLIENTS / "bin" / "mini"), "-m", f"openai/{MODEL}", "-t", task),
            *("--yolo", "--exit-immediately", "--cost-limit", "0"),
        ],
        environment=_mini,
        **_shell("bash", "command"),
        finish=tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    _through_litellm("chat", "v1/chat/completions"),
    _through_litellm("messages", "v1/messages"),
    _through_litellm("responses", "v1/responses"),
]
