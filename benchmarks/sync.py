"""Publishing, every installed transport in one table, with memcpy and a plain gloo broadcast beside; and the aims.

    python benchmarks/sync.py [--megabytes N] [--repeats N] [--engines N ...] [--transport NAME ...]

The engines are embedded engines, each a process of its own, with a Qwen3 model in bfloat16 of about that size; the
trainer's end and the controller are this process. GB/s are of the whole publish, checksums included, summed over
engines. Exit status 0 whatever is met: the table says it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_core.plugins import PluginManager
from miles_core.sync.auto import Measurement
from miles_core.sync.plan import host_bytes
from miles_core.sync.shared_buffers import copy_and_check
from miles_core.testing.measuring import measure_publishes, plain_rates

HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 6144, 32_768
_AIMS = (
    ("shared memory, verified: at least 0.4 of memcpy", "shared_memory", "memcpy", 1),
    ("the same of memcpy tensor by tensor", "shared_memory", "memcpy, tensor by tensor", 1),
    ("the same of a copy and one checksum by two threads", "shared_memory", "copy with checksum, 2 threads", 1),
    ("broadcast: at least 0.9 of a plain gloo broadcast", "broadcast", "gloo broadcast", 1),
    ("p2p (NIXL) to 4 engines: at least 1.5 of a gloo broadcast", "p2p nixl", "gloo broadcast", 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--transport", nargs="+", default=[], help="these alone")
    options = parser.parse_args()
    plugins = PluginManager.discover()
    ways: list[tuple[str, dict[str, object]]] = []
    for name in plugins.names("miles_weight_transports"):
        if name == "p2p":
            ways += [("p2p", {"library": library}) for library in ("nixl", "mooncake")]
        elif name != "auto":
            ways.append((name, {}))
    ways = [way for way in ways if not options.transport or way[0] in options.transport]
    found: dict[tuple[str, int], float] = {}
    shares: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = qwen3(options.megabytes * 1_000_000)
        model.save_pretrained(directory)
        weights = [(n, t.detach()) for n, t in model.state_dict().items() if n != "lm_head.weight"]
        nbytes = sum(t.numel() * t.element_size() for _, t in weights)
        print(f"{nbytes / 1e9:.2f} GB in {len(weights)} tensors, load {os.getloadavg()[0]:.1f}\n")
        print("| | engines | GB/s | seconds | paused | checksums |\n|---|---|---|---|---|---|", flush=True)
        for engines in options.engines:
            plain = plain_rates(nbytes, engines, options.repeats)
            plain |= {what: engines * seconds for what, seconds in copies(weights, options.repeats).items()}
            for what, seconds in plain.items():
                found[what, engines] = nbytes * engines / seconds / 1e9
                print(f"| {what} | {engines} | {found[what, engines]:.2f} | {seconds:.3f} | | |", flush=True)
            for use, settings in ways:
                with embedded_engines(Path(directory), engines) as urls:
                    row = measure_publishes(plugins, use, dict(settings), weights, urls, options.repeats)
                print(_line(row, engines), flush=True)
                if not row.failure:
                    found[row.transport, engines] = row.rate
                    shares[row.transport, engines] = row.verify_share
    print("\n| aim | found |\n|---|---|")
    for aim, of, beside, engines in _AIMS:
        if (of, engines) in found:
            print(f"| {aim} | {found[of, engines] / found[beside, engines]:.2f} |")
    for (way, engines), share in shares.items():
        print(f"| checksums: under 25 % of a publish in memory ({way}, {engines}) | {share:.0%} |")


def copies(weights: Sequence[tuple[str, torch.Tensor]], repeats: int) -> dict[str, float]:
    """Seconds, the best of `repeats`: the same tensors into one buffer, whole and one after another; the same by two
    threads with their checksums, which is what a trainer's side does at least."""
    sources = [host_bytes(tensor) for _, tensor in weights]
    memory = memoryview(bytearray(sum(map(len, sources))))
    ends = [*accumulate(map(len, sources))]
    targets = [memory[end - len(source) : end] for source, end in zip(sources, ends, strict=True)]

    def plain() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(np.asarray(target), np.asarray(source))

    def best(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    with ThreadPoolExecutor(2) as pool:
        return {
            "memcpy, tensor by tensor": best(plain),
            "copy with checksum, 2 threads": best(lambda: list(pool.map(copy_and_check, sources, targets))),
        }


def qwen3(nbytes: int) -> Qwen3ForCausalLM:
    """Random weights, bfloat16, of as many layers as make up `nbytes`; the head is tied."""
    layer = 3 * HIDDEN * INTERMEDIATE + 3 * HIDDEN * HIDDEN
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=max(1, round((nbytes / 2 - VOCABULARY * HIDDEN) / layer)),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


@contextmanager
def embedded_engines(model: Path, count: int) -> Iterator[list[str]]:
    """URLs of so many engine processes, which share the cores."""
    threads = max(1, (os.cpu_count() or 1) // count)
    command = [sys.executable, "-m", "miles_core.engines.embedded", "--model", str(model), "--dtype", "bfloat16"]
    command += ["--max-total-tokens", "64", "--max-running", "1", "--threads", str(threads), "--wait-for-weights"]
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            processes.append(process)
        yield [json.loads(process.stdout.readline())["url"] for process in processes if process.stdout]


def _line(row: Measurement, engines: int) -> str:
    if row.failure:
        return f"| {row.transport} | {engines} | {row.failure} | | | |"
    return (
        f"| {row.transport} | {engines} | {row.rate:.2f} | {row.seconds:.3f} | {row.paused_seconds:.3f} | "
        f"{row.verify_share:.0%} |"
    )


if __name__ == "__main__":
    main()
