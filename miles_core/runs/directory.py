"""The run directory: what a run leaves, and how it is opened without ever overwriting another one.

config.json          resolved config with the origin of every value
environment.json     versions of Python, packages and plugins; host
ledger.sqlite        state of every group
metrics.sqlite       numbers by step, and the timeline
rollouts/            one Parquet file a batch: step-000012.parquet; evaluations beside them
checkpoints/         step-000012/, each complete or absent
export/              the trained model as a Hugging Face directory
logs/                one file a process
evaluation/          logs of evaluation engines; weights that an external evaluation is measuring
run.lock             held by the process that writes
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import IO

import importlib_metadata
import orjson

from miles_core.config.load import LoadedConfig, loaded_from_tree
from miles_core.errors import RunDirectoryError
from miles_core.plugins import PluginManager
from miles_core.runs.atomic import write_atomic

__all__ = ["RunDirectory"]


class RunDirectory:
    """Paths of a run, and the lock that keeps two writers apart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    # Where things are.

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.sqlite"

    @property
    def export_directory(self) -> Path:
        return self.path / "export"

    def log_file(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"

    def rollout_file(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step:06d}.parquet"

    def evaluation_file(self, dataset: str, mode: str, version: int) -> Path:
        return self.path / "rollouts" / f"eval-{dataset}-{mode}-{version:06d}.parquet"

    def evaluated_weights(self, version: int) -> Path:
        """Weights for an external evaluation, for as long as it takes."""
        return self.path / "evaluation" / f"version-{version:06d}"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of every complete checkpoint, oldest first."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted((int(p.name.removeprefix("step-")), p) for p in found)

    # Opening.

    @classmethod
    def create(cls, path: Path, loaded: LoadedConfig, plugins: PluginManager) -> RunDirectory:
        """Make a new run directory. Raises `RunDirectoryError` when there is something already."""
        if path.exists() and any(path.iterdir()):
            raise RunDirectoryError(
                f"{path} exists and is not empty: it is never overwritten. Continue it with `miles resume {path}`, "
                f"choose another name with `--set run.name=…`, or remove it"
            )
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        for name in ("rollouts", "checkpoints", "logs"):
            (temporary / name).mkdir(parents=True)
        stored = {"config": loaded.resolved(), "origins": loaded.origins}
        write_atomic(temporary / "config.json", orjson.dumps(stored, option=orjson.OPT_INDENT_2))
        write_atomic(temporary / "environment.json", orjson.dumps(_environment(plugins), option=orjson.OPT_INDENT_2))
        temporary.rename(path)  # complete or not there, and over an empty directory at most
        directory = cls(path)
        directory.lock()
        return directory

    @classmethod
    def open(cls, path: Path, *, write: bool) -> RunDirectory:
        """Open an existing run directory. Raises `RunDirectoryError` when it is none, or in use."""
        directory = cls(path)
        if not directory.config_file.is_file():
            raise RunDirectoryError(
                f"{path} is not a run directory: it has no config.json; `miles runs list` shows what there is"
            )
        if write:
            directory.lock()
        return directory

    def loaded_config(self) -> LoadedConfig:
        """The config that the run was started with."""
        stored = orjson.loads(self.config_file.read_bytes())
        return loaded_from_tree(stored["config"], stored["origins"])

    def lock(self) -> None:
        """Hold the run directory for writing until the process ends. Raises `RunDirectoryError` when it is held."""
        file = (self.path / "run.lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise RunDirectoryError(
                f"{self.path} is in use by process {holder}: wait for it to end, or stop it"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._lock = file

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Keeping it small.

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints."""
        for _, path in self.checkpoints()[:-keep]:
            shutil.rmtree(path)

    def remove_temporary(self) -> None:
        """Remove what a killed process left half-written: names that start with a dot and end in `.tmp` or `.old`."""
        for pattern in (".*.tmp", ".*.old"):
            for path in [*self.path.glob(pattern), *self.path.glob(f"*/{pattern}")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.path.glob("evaluation/version-*"):
            shutil.rmtree(path)


def _environment(plugins: PluginManager) -> dict[str, object]:
    """What the numbers of a run may depend on."""
    packages = {d.name: d.version for d in importlib_metadata.distributions() if d.name}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "plugins": {p.name: f"{p.distribution} {p.version}" for p in plugins.plugins},
        "packages": dict(sorted(packages.items())),
    }
