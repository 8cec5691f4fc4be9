"""Tokens per second of the embedded engine against ``transformers.generate`` with static batches.

    python benchmarks/embedded_engine.py MODEL_DIRECTORY

64 requests of 8 prompts (groups of 8), sampled at temperature 1 without end of sequence, in float32. Output lengths
are log-normal (median 16, at most 128) or all equal. ``generate`` gets batches of the size that the engine runs, in
order, each until its longest request ends; it is warmed up, as the engine is. The two alternate, and the best of
the repeats counts, so that other load on the machine hits neither alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPS, GROUP_SIZE = 8, 8


def workload(kind: str, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts and output lengths."""
    generator = torch.Generator().manual_seed(0)
    few_shot = torch.randint(3, vocabulary, (40,), generator=generator).tolist()
    prompts = []
    for _ in range(GROUPS):
        length = int(torch.randint(20, 40, (1,), generator=generator))
        prompts += [few_shot + torch.randint(3, vocabulary, (length,), generator=generator).tolist()] * GROUP_SIZE
    count = GROUPS * GROUP_SIZE
    if kind == "equal":
        return prompts, [32] * count
    lengths = (16 * torch.randn(count, generator=generator).exp()).round().clamp(1, 128)
    return prompts, [int(length) for length in lengths]


def run_generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> float:
    """Return the seconds that static, left-padded batches take."""
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some])
        longest = max(lengths[first : first + batch])
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
    return time.perf_counter() - start


async def run_engine(url: str, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds that the engine takes for all requests at once, its prefix cache empty at the start."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await session.post("/flush_cache")

        async def one(index: int) -> int:
            params = {"max_new_tokens": lengths[index], "ignore_eos": True, "sampling_seed": index}
            body = {"input_ids": prompts[index], "sampling_params": params, "return_logprob": True, "priority": index}
            async with session.post("/generate", json=body) as response:
                response.raise_for_status()
                return len((await response.json())["output_ids"])

        start = time.perf_counter()
        counts = await asyncio.gather(*(one(index) for index in range(len(prompts))))
        seconds = time.perf_counter() - start
    if counts != lengths:
        raise RuntimeError(f"the engine answered {counts} tokens, {lengths} were asked for")
    return seconds


def start_engine(options: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    """Return the engine's process and URL."""
    command = [sys.executable, "-m", "miles_core.engines.embedded", "--model", options.model]
    command += ["--dtype", options.dtype, "--threads", str(options.threads), "--max-running", str(options.batch)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready: dict[str, Any] = json.loads(process.stdout.readline())
    return process, ready["url"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face model directory")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=32, help="sequences that decode together")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    process, url = start_engine(options)
    try:
        print(f"{'lengths':<12}{'tokens':>8}{'generate tok/s':>16}{'engine tok/s':>14}{'ratio':>8}")
        for kind in ("log-normal", "equal"):
            prompts, lengths = workload(kind, model.config.vocab_size)
            run_generate(model, prompts[:4], [2] * 4, 4)
            asyncio.run(run_engine(url, prompts[:4], [2] * 4))
            generate_seconds, engine_seconds = [], []
            for _ in range(options.repeats):
                generate_seconds.append(run_generate(model, prompts, lengths, options.batch))
                engine_seconds.append(asyncio.run(run_engine(url, prompts, lengths)))
            tokens = sum(lengths)
            rival, ours = tokens / min(generate_seconds), tokens / min(engine_seconds)
            print(f"{kind:<12}{tokens:>8}{rival:>16.1f}{ours:>14.1f}{ours / rival:>8.2f}", flush=True)
            spread = statistics.median(engine_seconds) / min(engine_seconds)
            print(f"  median over best of the engine's repeats: {spread:.2f}", file=sys.stderr)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)


if __name__ == "__main__":
    main()
