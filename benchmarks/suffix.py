"""Tokenising what a turn adds, beside rendering the whole conversation again and the bridge of `renderers` (PyPI).

    python benchmarks/suffix.py [--turns 128] [--repeats 200]

Qwen3 with a trained vocabulary that holds its markers. A turn is a tool's result of some sixty words and a reply; every
fourth reply is sampled character by character, as no tokenizer would spell it. What counts as exact is that the next
prompt begins with the ids that were sampled. Medians; the three are timed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.contracts.families import Tokenizer
from miles_core.data.tokenizer import load_tokenizer
from miles_core.testing.other_renderers import renderer_over
from miles_core.testing.tokenizers import write_tokenizer
from miles_core.tito.families.qwen3 import Qwen3Config, Qwen3Family
from miles_core.tito.suffix import turn_suffix
from miles_core.tito.tree import Added, Node

MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
RESULTS = ("<tool_response>", "</tool_response>")
Ids = list[int]


def reply(tokenizer: Tokenizer, number: int) -> tuple[Ids, dict[str, Any]]:
    """Sampled ids and the message that they spell."""
    content = f"I look at file {number}, which says what happened next in the story of the run."
    pieces = content if number % 4 == 0 else [content]
    ids = [i for piece in pieces for i in tokenizer.encode(piece)]
    return [*ids, tokenizer.special("<|im_end|>")], {"role": "assistant", "content": content}


def clock(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(write_tokenizer(Path(directory), special=[*MARKERS, *RESULTS]))
    family = Qwen3Family(Qwen3Config())
    rival = renderer_over("qwen3", {}, tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out what happened, file by file."}]
    prompt: Ids = family.render(messages, tokenizer, add_generation_prompt=True)
    node = Node(None, (), None, 0)
    ours_exact = whole_exact = rival_exact = 0
    new: Sequence[dict[str, Any]] = ()
    for number in range(options.turns):
        sampled, message = reply(tokenizer, number)
        added = Added(
            turn_id=str(number),
            drop=0,
            ids=np.array([*prompt[node.length :], *sampled], np.int32),
            sampled=len(prompt) - node.length,
            logprobs=np.zeros(len(sampled), np.float32),
            versions=((0, len(sampled)),),
            finish_reason="stop",
            parts=(),
            messages=b"",
        )
        node = child(node, len(messages), added)
        before, messages = prompt, [*messages, message]
        new = [{"role": "tool", "content": f"line {number}: " + "one more word of the file and " * 10}]
        held = [*before, *sampled]
        whole = family.render([*messages, *new], tokenizer, add_generation_prompt=True)
        bridged = rival.bridge_to_next_turn(before, sampled, list(new))
        suffix = turn_suffix(family, tokenizer, node, [*messages, *new], ())
        prompt = [*held, *suffix.ids.tolist()]
        ours_exact += suffix.drop == 0
        whole_exact += whole[: len(held)] == held
        rival_exact += bridged is not None and list(bridged.token_ids) == prompt
        messages = [*messages, *new]
    last = [
        lambda: np.concatenate([node.ids(), turn_suffix(family, tokenizer, node, messages, ()).ids]),
        lambda: family.render(messages, tokenizer, add_generation_prompt=True),
        lambda: rival.bridge_to_next_turn(before, sampled, list(new)),
    ]
    seconds = [[clock(work) for work in last] for _ in range(options.repeats)]
    ours, again, theirs = (statistics.median(column) for column in zip(*seconds, strict=True))
    print(f"turn {options.turns}, {len(prompt)} tokens, {options.repeats} repeats")
    print("| next prompt by | µs | of ours | exact turns |\n|---|---|---|---|")
    for name, took, exact in (
        ("suffix tokenisation", ours, ours_exact),
        ("rendering the whole", again, whole_exact),
        ("`renderers`, bridge", theirs, rival_exact),
    ):
        print(f"| {name} | {1e6 * took:.0f} | {took / ours:.1f} | {exact} of {options.turns} |")


def child(parent: Node, depth: int, added: Added) -> Node:
    """A turn behind `parent` whose request ended at message `depth`."""
    node = Node(parent, tuple(b"" for _ in range(depth + 1 - parent.depth)), added, parent.order + 1)
    parent.children = (node,)
    HELD.append(parent)
    return node


HELD: list[Node] = []
"""A tree holds its nodes; here there is none."""


if __name__ == "__main__":
    main()
