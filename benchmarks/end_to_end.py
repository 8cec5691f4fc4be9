"""Trained samples per second against TRL's GRPOTrainer: same prompts, rewards, group size, lengths, dtype and threads.

    python benchmarks/end_to_end.py [tiny | quickstart] [--steps N] [--seeds 0 1 2] [--curves OUT.svg]

Each system runs in a process of its own, one after the other, with the same number of threads. What counts is the
median time of a step after the first two (generation, scoring, the optimizer step, and for miles-core the publish),
so that start-up hits neither. `--curves` draws the reward of both over all seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_miles(config: Path, steps: int, seed: int, threads: int) -> dict[str, list[float]]:
    """Seconds and reward of every step, from the run's own metrics."""
    from miles_core.runs.metrics import MetricsStore

    with tempfile.TemporaryDirectory() as scratch:
        overrides = {
            "run.directory": scratch,
            "run.name": "bench",
            "run.steps": steps,
            "run.seed": seed,
            "run.export": "false",
            "engine.threads": threads,
            "evaluation.datasets": "[]",
            "filters": "[]",
        }
        command = [sys.executable, "-m", "miles_core.cli.main", "train", str(config), "--quiet"]
        for key, value in overrides.items():
            command += ["--set", f"{key}={value}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        store = MetricsStore(Path(scratch) / "bench" / "metrics.sqlite")
        reward = [value for _, value in store.series("rollout", "reward/mean")]
        spans = [s for s in store.spans() if s[1] in ("generate", "train", "publish")]
        store.close()
    seconds = []
    for step in range(1, steps + 1):
        own = [s for s in spans if s[2] == step]
        seconds.append(max(s[4] for s in own) - min(s[3] for s in own))
    return {"seconds": seconds, "reward": reward}


def run_trl(config: Path, steps: int, seed: int, threads: int) -> dict[str, list[float]]:
    """The same with TRL, in this very process (call it in a child)."""
    import asyncio
    import time

    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from miles_core.config.load import load_config
    from miles_core.contracts.rewards import Sample
    from miles_core.data.group import Episode, Prompt
    from miles_core.data.trajectory import Status
    from miles_core.models.reference import resolve_model
    from miles_core.plugins import PluginManager
    from miles_core.rollout.order import PromptOrder
    from miles_core.runs.components import build_components

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    settings = load_config(config).config
    parts = build_components(settings, PluginManager.discover())
    order = PromptOrder(len(parts.source), seed, shuffle=True)
    count = steps * settings.schedule.batch_groups
    prompts = [parts.source.prompt(order.row(k)[1], epoch=order.row(k)[0]) for k in range(count)]
    rows = Dataset.from_list([{"prompt": [dict(m) for m in p.messages], "number": i} for i, p in enumerate(prompts)])

    def score(completions: list[list[dict[str, str]]], number: list[int], **_: object) -> list[float]:
        samples = [_sample(prompts[n], c[0]["content"]) for n, c in zip(number, completions, strict=True)]
        return [float(s) for s in asyncio.run(parts.reward.score(samples))]  # type: ignore[arg-type]

    def _sample(prompt: Prompt, text: str) -> Sample:
        messages = (*prompt.messages, {"role": "assistant", "content": text})
        episode = Episode(
            episode_id="e", prompt_id=prompt.prompt_id, group_id="g", status=Status.COMPLETED, trajectories=()
        )
        return Sample(prompt=prompt, response=text, messages=messages, episode=episode)

    seconds: list[float] = []
    reward: list[float] = []

    class Clock(TrainerCallback):
        begin = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.perf_counter() - self.begin)

        def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
            if "reward" in logs:
                reward.append(logs["reward"])

    directory = resolve_model(settings.model.path).directory
    schedule, sampling = settings.schedule, settings.sampling
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, settings.model.dtype)),
            processing_class=AutoTokenizer.from_pretrained(directory),
            reward_funcs=score,
            train_dataset=rows,
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                seed=seed,
                max_steps=steps,
                per_device_train_batch_size=schedule.batch_groups * schedule.group_size,
                num_generations=schedule.group_size,
                max_completion_length=sampling.max_new_tokens,
                temperature=sampling.temperature,
                beta=0.0,
                loss_type="dapo",
                learning_rate=float(settings.backend.settings["learning_rate"]),
                adam_beta2=0.95,
                lr_scheduler_type="constant",
                shuffle_dataset=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            callbacks=[Clock()],
        )
        trainer.train()
    return {"seconds": seconds, "reward": reward}


def child(name: str, config: Path, steps: int, seed: int, threads: int) -> dict[str, list[float]]:
    """Run one system in a process of its own."""
    arguments = ["--child", name, "--config", str(config), "--steps", str(steps), "--seeds", str(seed)]
    command = [sys.executable, __file__, *arguments, "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    result: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Print one table, and draw the curves when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="?", default="tiny", choices=["tiny", "quickstart"])
    parser.add_argument("--config", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--child", choices=["miles", "trl"])
    options = parser.parse_args()
    systems = {"miles": run_miles, "trl": run_trl}
    if options.child:
        run = systems[options.child]
        print(json.dumps(run(options.config, options.steps, options.seeds[0], options.threads)))
        return
    from miles_core.config.load import load_config

    config = options.config or ROOT / "examples" / f"{options.which}.toml"
    schedule = load_config(config).config.schedule
    batch = schedule.batch_groups * schedule.group_size
    results = {
        name: [child(name, config, options.steps, seed, options.threads) for seed in options.seeds] for name in systems
    }
    print(f"{config.stem}: {batch} samples a step, {options.steps} steps, seeds {options.seeds}")
    print(f"{'system':<8} {'median step, s':>15} {'samples/s':>10} {'last reward':>12}")
    medians = {}
    for name, runs in results.items():
        medians[name] = statistics.median(s for r in runs for s in r["seconds"][2:])
        last = statistics.mean(statistics.mean(r["reward"][-3:]) for r in runs)
        print(f"{name:<8} {medians[name]:>15.3f} {batch / medians[name]:>10.1f} {last:>12.3f}")
    print(f"ratio of samples/s, miles to trl: {medians['trl'] / medians['miles']:.2f}")
    if options.curves:
        draw(options.curves, results)


def draw(path: Path, results: dict[str, list[dict[str, list[float]]]]) -> None:
    """Mean reward a step over the seeds, with its standard error."""
    from miles_core.runs.report.charts import curve

    series = {}
    for name, runs in results.items():
        points = []
        for step, values in enumerate(zip(*(r["reward"] for r in runs), strict=True), start=1):
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            points.append((float(step), statistics.mean(values), error))
        series[name] = points
    style = (
        "<style>.tick{font:11px sans-serif;fill:#5b6470}.grid{stroke:#dfe3e8}.line{fill:none;stroke-width:1.8}"
        ".band{opacity:.16}.name{font:600 11px sans-serif}"
        ".line.s0{stroke:#1f6feb}.dot.s0,.band.s0,.name.s0{fill:#1f6feb}"
        ".line.s1{stroke:#c2410c}.dot.s1,.band.s1,.name.s1{fill:#c2410c}</style>"
    )
    drawing = curve(series, title="reward of training batches, mean over seeds ± standard error")
    drawing = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    path.write_text(drawing.replace("</title>", f"</title>{style}", 1))


if __name__ == "__main__":
    main()
