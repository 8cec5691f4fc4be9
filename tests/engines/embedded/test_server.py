"""The engine as a process, over HTTP. Two processes, because a run must not depend on which one it got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import VOCABULARY, body, prompts
from .test_engine import checkpoint, publish


class Server:
    """A started engine process."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "miles_core.engines.embedded", "--model", str(directory), "--threads", "1"]
        self.process = subprocess.Popen(
            [*command, "--stream-interval", "1", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )

    def wait(self) -> None:
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        assert ready["pid"] == self.process.pid
        self.url = ready["url"]

    def open(self, path: str, content: Any = None) -> Any:
        data = None if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data=data), timeout=60)

    def call(self, path: str, content: Any = None) -> tuple[int, Any]:
        """POST ``content``, or GET without; return status and body."""
        try:
            with self.open(path, content) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(timeout=20)
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def directory(model_directory: Callable[[str], Path]) -> Path:
    """Return a model with a tokenizer whose token i is the letter number i."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = {chr(0x4E00 + index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(0x4E00)))
    tokenizer.decoder = decoders.Fuse()
    path = model_directory("llama")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def servers(directory: Path) -> Iterator[list[Server]]:
    """Return two engines alike, and one that waits for weights."""
    started = [Server(directory, "--max-running", "4", "--max-prefill-tokens", "32") for _ in range(2)]
    started.append(Server(directory, "--wait-for-weights"))
    for server in started:
        server.wait()
    yield started
    codes = [server.end() for server in started if server.process.poll() is None]
    assert codes == [0] * len(codes)


def test_two_processes_given_the_same_queue_answer_bit_for_bit_alike(servers: list[Server]) -> None:
    some = prompts(10, shared=4, high=30)
    bodies = [
        body(ids, max_new_tokens=3 + 2 * index, ignore_eos=True, sampling_seed=index, top_p=0.9 if index % 3 else 1.0)
        | {"priority": index}
        for index, ids in enumerate([*some, *some[:4]])
    ]

    def answers(server: Server, order: list[int]) -> list[Any]:
        server.call("/pause_generation", {"mode": "retract"})
        server.call("/flush_cache", {})
        with ThreadPoolExecutor(len(bodies)) as pool:
            futures = {}
            for index in order:  # arrival differs between the two, priority does not
                futures[index] = pool.submit(server.call, "/generate", bodies[index])
            while server.call("/server_info")[1]["num_queue_reqs"] < len(bodies):
                time.sleep(0.02)
            server.call("/continue_generation", {})
            return [futures[index].result()[1] for index in range(len(bodies))]

    first = answers(servers[0], list(range(len(bodies))))
    second = answers(servers[1], list(range(len(bodies)))[::-1])
    for one, other in zip(first, second, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["meta_info"]["output_token_logprobs"] == other["meta_info"]["output_token_logprobs"]
        assert one["meta_info"]["cached_tokens"] == other["meta_info"]["cached_tokens"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "JSON"),
        ([], "object"),
        ({}, "input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[]]}, "empty"),
        ({"input_ids": [VOCABULARY]}, "outside the vocabulary"),
        ({"input_ids": [-1]}, "outside the vocabulary"),
        ({"input_ids": [1.5]}, "integer"),
        ({"input_ids": [True]}, "integer"),
        ({"input_ids": "text"}, "list"),
        ({"input_ids": [3] * 512}, "512 tokens"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": 512}}, "at most 511"),
        ({"input_ids": [3], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"input_ids": [3], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [3], "sampling_params": {"temperature": 1e-9}}, "greedy"),
        ({"input_ids": [3], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [3], "sampling_params": {"stop": [""]}}, "stop"),
        ({"input_ids": [3], "sampling_params": []}, "sampling_params"),
        ({"input_ids": [3], "return_routed_experts": True}, "no routed experts"),
        ({"input_ids": [[3], [4]], "rid": ["a"]}, "1 values for 2 prompts"),
        ({"input_ids": [3], "prompt": "x"}, "prompt"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(servers: list[Server], content: Any, message: str) -> None:
    status, answer = servers[0].call("/generate", content)
    assert status == 400
    assert message in answer["error"]["message"]
    assert servers[0].call("/health_generate")[0] == 200


def test_a_batch_answers_in_order(servers: list[Server]) -> None:
    some = prompts(3)
    status, answers = servers[0].call(
        "/generate", {"input_ids": some, "sampling_params": {"temperature": 0, "max_new_tokens": 2}, "rid": "b"}
    )
    assert status == 200
    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1", "b_2"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [len(ids) for ids in some]


def test_stop_strings_and_text(servers: list[Server]) -> None:
    (ids,) = prompts(1)
    request = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    _, free = servers[0].call("/generate", request)
    assert free["text"] == "".join(chr(0x4E00 + token) for token in free["output_ids"])
    stop = free["text"][2:4]
    request["sampling_params"]["stop"] = [stop, "absent"]
    _, stopped = servers[0].call("/generate", request)
    end = free["text"].index(stop)
    assert stopped["output_ids"] == free["output_ids"][: end + 2]
    assert stopped["text"] == free["text"][:end]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_batch_streams_each_answer_under_its_index(servers: list[Server]) -> None:
    bodies = [body(ids, temperature=0, max_new_tokens=4, ignore_eos=True) for ids in ([5, 6], [7, 8, 9], [5, 6])]
    alone = [servers[0].call("/generate", one)[1]["output_ids"] for one in bodies]
    batch = {
        "input_ids": [one["input_ids"] for one in bodies],
        "sampling_params": bodies[0]["sampling_params"],
        "rid": ["a", "b", "c"],
        "return_logprob": True,
        "stream": True,
    }
    finished: dict[int, list[int]] = {}
    with servers[0].open("/generate", batch) as response:
        lines = [line[5:].strip() for line in response if line.startswith(b"data:")]
    assert lines[-1] == b"[DONE]"
    for line in lines[:-1]:
        answer = json.loads(line)
        assert answer["meta_info"]["id"] == "abc"[answer["index"]]
        assert answer["index"] not in finished, "nothing comes after a finished answer"
        if answer["meta_info"]["finish_reason"] is not None:
            finished[answer["index"]] = answer["output_ids"]
    assert [finished[i] for i in range(3)] == alone


def test_a_stream_opens_when_queued_and_grows(servers: list[Server]) -> None:
    server, (ids,) = servers[0], prompts(1)
    server.call("/pause_generation", {"mode": "in_place"})
    request = body(ids, temperature=0, max_new_tokens=5, ignore_eos=True) | {"stream": True}
    with server.open("/generate", request) as response:  # the headers come although nothing runs
        assert server.call("/server_info")[1]["num_queue_reqs"] == 1
        server.call("/continue_generation", {})
        events = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    outputs = [json.loads(event)["output_ids"] for event in events[:-1]]
    assert [len(output) for output in outputs] == [1, 2, 3, 4, 5]
    assert all(output == outputs[-1][: len(output)] for output in outputs)


def test_a_client_that_goes_away_frees_its_row(servers: list[Server]) -> None:
    server = servers[0]
    request = body([5, 6, 7], max_new_tokens=400, ignore_eos=True) | {"stream": True}
    with server.open("/generate", request) as response:
        response.readline()
    deadline = time.monotonic() + 20
    while server.call("/server_info")[1]["num_running_reqs"] and time.monotonic() < deadline:
        time.sleep(0.02)
    info = server.call("/server_info")[1]
    assert info["num_running_reqs"] == 0
    assert info["num_used_tokens"] == info["num_evictable_tokens"]


def test_an_engine_that_waits_for_weights_serves_nothing_before_it_has_them(
    servers: list[Server], directory: Path, tmp_path: Path
) -> None:
    server, request = servers[2], body([5, 6], temperature=0, max_new_tokens=3)
    assert server.call("/health")[0] == 200
    assert server.call("/generate", request)[0] == 503
    assert server.call("/health_generate")[0] == 503
    manifest = {"path": str(tmp_path / "v7"), "weight_version": 7}
    manifest["tensors"] = publish(tmp_path / "v7", checkpoint(directory))
    status, staged = server.call("/stage_weights", manifest)
    assert status == 200
    assert staged["success"]
    assert staged["checksums"] == {entry["name"]: entry["checksum"] for entry in manifest["tensors"]}
    assert server.call("/commit_weights", {"weight_version": 7})[0] == 409  # not paused
    server.call("/pause_generation", {"mode": "abort"})
    assert server.call("/commit_weights", {"weight_version": 8})[0] == 409
    assert server.call("/commit_weights", {"weight_version": 7})[0] == 200
    server.call("/continue_generation", {})
    status, answer = server.call("/generate", request)
    assert status == 200
    assert answer["meta_info"]["weight_version"] == "7"
    assert answer["output_ids"] == servers[1].call("/generate", request)[1]["output_ids"]
    assert server.call("/weights_checker", {"action": "checksum"})[1]["checksums"] == staged["checksums"]
    corrupted = bytearray((tmp_path / "v7").read_bytes())
    corrupted[100] ^= 4
    (tmp_path / "v8").write_bytes(corrupted)
    status, refused = server.call("/stage_weights", manifest | {"path": str(tmp_path / "v8"), "weight_version": 8})
    assert status == 409
    assert manifest["tensors"][0]["name"] in refused["error"]["message"]
    assert server.call("/model_info")[1]["weight_version"] == "7"


def test_abort_over_http_is_a_200_with_partial_tokens(servers: list[Server]) -> None:
    server = servers[1]
    server.call("/pause_generation", {"mode": "in_place"})
    answers: list[Any] = []
    request = body([5, 6, 7], max_new_tokens=4) | {"rid": "gone"}
    caller = threading.Thread(target=lambda: answers.append(server.call("/generate", request)))
    caller.start()
    while server.call("/server_info")[1]["num_queue_reqs"] < 1:
        time.sleep(0.01)
    assert server.call("/abort_request", {"rid": "gone"})[1]["aborted"] == 1
    caller.join()
    server.call("/continue_generation", {})
    ((status, answer),) = answers
    assert status == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.call("/abort_request", {})[0] == 400
    assert server.call("/pause_generation", {"mode": "sleep"})[0] == 400


def test_the_process_ends_on_sigterm(servers: list[Server]) -> None:
    servers[0].process.terminate()
    servers[0].process.wait(timeout=20)
    assert servers[0].end() == 0
