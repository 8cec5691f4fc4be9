"""The sections of a run config. Component sections hold `use` and the component's own keys, which its plugin
validates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "ComponentList",
    "ComponentSection",
    "EvaluationDataset",
    "EvaluationSection",
    "FiltersSection",
    "ModelSection",
    "ObjectiveSection",
    "PluginsSection",
    "RewardSection",
    "RunSection",
    "SamplingSection",
    "ScheduleSection",
    "Section",
    "SessionsSection",
    "TeacherSection",
    "TrackersSection",
]


class Section(BaseModel):
    """A frozen section: unknown keys are refused, and the string under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ComponentSection(BaseModel):
    """Chooses a component by name; every other key belongs to that component and is validated by its plugin."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    use: str
    """Name of the component, as a plugin registers it."""

    @property
    def settings(self) -> dict[str, Any]:
        """The component's own keys."""
        return dict(self.model_extra or {})


def _named(value: object) -> object:
    """`engine = "embedded"` is short for `[engine] use = "embedded"`."""
    return {"use": value} if isinstance(value, str) else value


Named = Annotated[ComponentSection, BeforeValidator(_named)]


def _listed(value: object) -> object:
    """`filters = ["nonzero_std"]` is short for `[filters] use = ["nonzero_std"]`."""
    return {"use": value} if isinstance(value, list) else value


class ComponentList(BaseModel):
    """A list of components by name; `[section.NAME]` holds the keys of the component NAME."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    use: tuple[str, ...] = ()
    """Names of the components, in order."""

    def settings(self, name: str) -> Any:
        return (self.model_extra or {}).get(name, {})


class FiltersSection(ComponentList):
    """Group filters, applied in order to every finished group."""


class TrackersSection(ComponentList):
    """Where metrics go."""

    use: tuple[str, ...] = ("sqlite", "console")
    """Names of the trackers."""


class PluginsSection(Section):
    """Which plugins load."""

    enable: tuple[str, ...] | None = None
    """Plugin names to load; without it, everything installed loads."""


class RunSection(Section):
    """The run as a whole."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run: its directory is `directory/name`."""

    directory: Path = Path("runs")
    """Where run directories are made. Relative paths start at the working directory."""

    steps: int = Field(ge=1)
    """Optimizer steps to take."""

    mode: Literal["reinforcement", "supervised"] = "reinforcement"
    """What the parts that the config does not choose are: `supervised` trains on the conversations of the data, starts
    no engine, and evaluates by held-out loss."""

    seed: int = Field(default=0, ge=0)
    """Seed of everything random: data order, sampling, initialisation."""

    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk."""

    export: bool = True
    """Write a Hugging Face directory of the trained model at the end."""


class ModelSection(Section):
    """The policy."""

    path: str
    """Hugging Face id, directory, `.gguf` file, `package:NAME` (weights inside a Python package), or `tiny:SEED`."""

    family: Named = Field(default=ComponentSection(use="chatml"), validate_default=True)
    """Model family that renders and parses messages."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and compute, in trainer and engine alike."""


class SamplingSection(Section):
    """How episodes are sampled."""

    max_new_tokens: int = Field(ge=1)
    """Most tokens of one turn."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs are taken at it on both sides."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling mass. Below 1 the sampled distribution is no longer the one that log-probs describe."""

    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k likeliest tokens; −1 for all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens below this fraction of the likeliest one's probability."""

    stop: tuple[str, ...] = ()
    """Strings that end a turn."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn, beside the family's own."""

    max_tokens: int = Field(default=0, ge=0)
    """Most tokens of a trajectory, prompt included; 0 for the model's own limit."""


class ScheduleSection(Section):
    """When episodes run and what a batch is."""

    mode: Literal["sync", "async"] = "sync"
    """`sync` alternates rollout and training; `async` overlaps them."""

    batch_groups: int = Field(ge=1)
    """Groups that one optimizer step consumes."""

    group_size: int = Field(ge=1)
    """Episodes of one group."""

    episode_timeout: float = Field(default=600.0, gt=0)
    """Seconds that an episode may take before it is `failed`; those in which it is parked apart."""

    reward_timeout: float = Field(default=600.0, gt=0)
    """Seconds that scoring a group may take before its episodes are `failed`."""

    retries: int = Field(default=2, ge=0)
    """How often a group with a failed or aborted episode is tried again before it is dropped, and how often a stale one
    is generated again (`stale`)."""

    max_drops: int = Field(default=0, ge=0)
    """Stop the run when one step has dropped this many groups; 0 means 20 × batch_groups."""

    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to requests in flight when weights change."""

    over_sample: int = Field(default=0, ge=0)
    """sync: groups issued beyond batch_groups; the first that pass train. What is reproducible no longer is."""

    partial: bool = False
    """Keep what the end of a synchronous step, or `pause = "abort"`, interrupts, and go on from there; without it those
    episodes start anew."""

    max_running: int = Field(default=0, ge=0)
    """async: most episodes that run at once; 0 means 2 × batch_groups × group_size."""

    slot: Literal["episode", "group"] = "episode"
    """async: a finished episode frees its slot, or only the whole group does."""

    capacity: int = Field(default=2, ge=1)
    """async: at most capacity × batch_groups groups are open: running, being scored, or finished and not yet taken."""

    max_staleness: int = Field(default=2, ge=0)
    """async, partial: most policy versions between the oldest token of a group and the trainer."""

    stale: Literal["drop", "retry", "reweight", "resample"] = "drop"
    """async, partial: what happens to a group over `max_staleness`: it is dropped, tried again, trained on its younger
    tokens, or its too old episodes are generated again."""

    stale_decay: float = Field(default=0.0, ge=0, lt=1)
    """`stale = "reweight"`: weight of a token, to the power of its versions over the bound; 0 trains none of them."""

    order: Literal["fifo", "freshest", "oldest_issue"] = "fifo"
    """async: which finished groups are trained first."""

    adaptive: bool = False
    """async: let concurrency and capacity follow measured rates. `max_running` and `capacity` become upper bounds."""

    target_staleness: float = Field(default=1.0, ge=0)
    """adaptive: mean staleness of a batch's groups that is aimed at, in versions."""


class SessionsSection(Section):
    """Sessions of agents: how the chat messages of an agent environment become trajectories."""

    matcher: Named = Field(default=ComponentSection(use="tool_arguments"), validate_default=True)
    """When a message that an agent sends again is the one that was stored."""

    mode: Literal["branching", "linear"] = "branching"
    """`branching` follows every history that an agent sends; `linear` refuses one that departs from the first."""

    leaves: Literal["drop_retries", "all"] = "drop_retries"
    """Which ends of a session train: all, or all but answers that were asked for again with the same messages."""

    max_nodes: int = Field(default=4096, ge=1)
    """Most turns of one session."""


class ObjectiveSection(BaseModel):
    """What is optimised. `[objective.NAME]` holds the keys of the algorithm, term or correction NAME; for a term also
    its `coefficient`, the weight in the loss (1.0)."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    algorithm: str = "grpo"
    """Advantage estimator."""

    terms: tuple[str, ...] = ("policy",)
    """Additive loss terms."""

    corrections: tuple[str, ...] = ()
    """Corrections of the train/rollout mismatch, multiplied."""

    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses become one number: mean over tokens, mean of episode means, or a constant denominator."""

    constant_length: int = Field(default=0, ge=0)
    """Denominator per episode of `aggregation = "constant"`; 0 takes `[sampling] max_new_tokens`."""

    def settings(self, name: str) -> Any:
        """The keys of the algorithm, term or correction `name`; a term's `coefficient` belongs to the core."""
        own = (self.model_extra or {}).get(name, {})
        return {k: v for k, v in own.items() if k != "coefficient"} if name in self.terms else own

    def coefficient(self, name: str) -> Any:
        """Weight of the term `name` in the loss."""
        return (self.model_extra or {}).get(name, {}).get("coefficient", 1.0)


class TeacherSection(Section):
    """The model that a `distillation` term learns from: frozen, on engines of its own."""

    path: str
    """The teacher, as `[model] path`. Its tokenizer must be the student's."""

    engine: Named = Field(default=ComponentSection(use="embedded"), validate_default=True)
    """Inference engine that scores the student's tokens."""

    top_k: int = Field(default=0, ge=0)
    """How many of the teacher's likeliest tokens to record at every position, for `distillation_top_k`."""


class RewardSection(ComponentSection):
    """What episodes are worth."""

    reward_key: str | None = None
    """Which entry of a mapping reward trains."""


class EvaluationDataset(ComponentSection):
    """One held-out data set; the other keys belong to its data source."""

    name: str = Field(min_length=1)
    """Name in metrics and report."""

    prompts: int = Field(default=0, ge=0)
    """How many rows to take, from the first; 0 for all."""

    samples: int = Field(default=1, ge=1)
    """Episodes a prompt, for pass@k."""

    greedy: bool = False
    """Also measure greedy decoding, once a prompt."""


class EvaluationSection(Section):
    """When and on what the policy is measured."""

    placement: Literal["shared", "dedicated", "external"] = "shared"
    """Where: on the rollout engines, while no new episode starts; on engines of its own, beside training; or by a
    function that is given a directory of weights, beside training."""

    overflow: Literal["wait", "skip"] = "wait"
    """When an evaluation is due while one still runs beside training: wait for it, or leave the new one out, with the
    reason recorded. The last version is never left out."""

    engine: Named = Field(default=ComponentSection(use="embedded"), validate_default=True)
    """Inference engine of `placement = "dedicated"`."""

    callable: str = ""
    """Function of `placement = "external"`: `module:function` or `path/to/file.py:function`. It is called with a
    directory of weights and the version, in a process of its own, and returns a number or a mapping a data set."""

    timeout: float = Field(default=3600.0, gt=0)
    """Seconds that one evaluation beside training may take."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 for none but the first and the last."""

    at_start: bool = True
    """Measure the policy before the first step."""

    datasets: tuple[EvaluationDataset, ...] = ()
    """The held-out data sets."""
