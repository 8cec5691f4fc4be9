"""`miles serve sessions` and `miles families` as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_core.cli.families import families
from miles_core.testing.stub_engine import StubEngine, served_stub
from miles_core.tito.probe import probe_template, templates_in

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FORGETS = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}\n{% endfor %}"
)


def post(url: str, body: Any, token: str = "") -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.loads(response.read())


def test_sessions_are_served_alone_and_end_with_a_signal(make_tokenizer: Callable[..., Path], tmp_path: Path):
    directory = make_tokenizer(tmp_path, tags=True)
    with served_stub(StubEngine(lambda ids, params: [65, 66])) as stub:
        command = [sys.executable, "-m", "miles_core.cli.main", "serve", "sessions", "--engine", stub.url]
        options = ["--family", "qwen3", "--family-option", "thinking=none", "--tokenizer", str(directory)]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            opened = post(f"{url}/sessions", {})
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            answer = post(f"{opened['base_url']}/v1/chat/completions", body, opened["token"])
            assert answer["usage"]["completion_tokens"] == 2
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            process.stdout.close()


@pytest.mark.parametrize("arguments", [["chatml"], ["qwen3"], ["qwen3", "--option", "thinking=forced"]])
def test_verify_proves_the_built_in_families(make_tokenizer: Callable[..., Path], tmp_path: Path, arguments: list[str]):
    directory = make_tokenizer(tmp_path, tags=True)
    done = CliRunner().invoke(families, ["verify", *arguments, "--tokenizer", str(directory), "--count", "60"])
    assert done.exit_code == 0, done.output
    assert "60 conversations, 0 refused" in done.output


def test_list_says_what_is_known_of_a_family():
    assert "qwen3  (template-equal, core)" in CliRunner().invoke(families, ["list"]).output


def test_probe_finds_what_a_template_forgets(tmp_path: Path):
    assert probe_template(CHATML, "chatml").word == "yes"
    found = probe_template(FORGETS, "forgets")
    assert found.word == "no"
    assert found.detail.startswith("reasoning: '(R1)A1' becomes")
    (tmp_path / "forgets.jinja").write_text(FORGETS)
    assert "forgets" in CliRunner().invoke(families, ["probe", str(tmp_path)]).output


def test_probe_of_the_trl_templates_agrees_with_what_was_found():
    """72 templates, 23 of them not prefix-stable over user, assistant with reasoning, user. Two more are of gpt-oss:
    they write another end behind the last answer, and cannot be rendered at all without `strftime_now`."""
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("the trl wheel, which carries the templates, is not installed")
    directory = Path(trl.origin).parent / "chat_templates"
    results = {name: probe_template(source, name) for name, source in templates_in(directory)}
    broken = {n for n, r in results.items() if "reasoning: " in r.detail and "reasoning: refused" not in r.detail}
    gpt_oss = {"gptoss", "gptoss_training"}
    assert (len(results), len(broken - gpt_oss)) == (72, 23)
    assert all("return|>" in results[name].detail for name in gpt_oss)
