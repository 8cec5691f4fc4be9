"""Which checkpoint tensors an inference engine keeps as one: the one place that knows.

Names are those of Hugging Face checkpoints. SGLang (and vLLM) hold query, key and value projections in one parameter,
gate and up projections in another, and the experts of a layer in two: `w13` with gate and up of each, `w2` with down.
"""

from __future__ import annotations

import dataclasses
import re

__all__ = ["Place", "fused_place", "is_expert"]

_STACKED = {
    **{f"{part}_proj": ("qkv_proj", index) for index, part in enumerate("qkv")},
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_LINEAR = re.compile(r"(?P<module>.*)\.(?P<part>\w+_proj)\.(?P<kind>weight|bias)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a checkpoint tensor stands in an engine's parameter: its `index` among the `count` tensors that follow one
    another in it, along dimension 0; `count` 0: as many as there are. `unit` names the tensors that must arrive
    together."""

    parameter: str
    index: int
    count: int
    unit: str


def is_expert(name: str) -> bool:
    """Whether the tensor is of one expert of a mixture-of-experts layer."""
    return _EXPERT.fullmatch(name) is not None


def fused_place(name: str) -> Place:
    """The place of a checkpoint tensor; one that is not fused has a parameter of its own name."""
    if found := _EXPERT.fullmatch(name):
        layer, expert, part = found["layer"], int(found["expert"]), found["part"]
        unit = f"{layer}.{expert}"
        if part == "down":
            return Place(parameter=f"{layer}.w2_weight", index=expert, count=0, unit=unit)
        return Place(parameter=f"{layer}.w13_weight", index=2 * expert + (part == "up"), count=0, unit=unit)
    found = _LINEAR.fullmatch(name)
    if found and found["part"] in _STACKED:
        stacked, index = _STACKED[found["part"]]
        parameter = f"{found['module']}.{stacked}.{found['kind']}"
        return Place(parameter=parameter, index=index, count=3 if stacked == "qkv_proj" else 2, unit=parameter)
    return Place(parameter=name, index=0, count=1, unit=name)
