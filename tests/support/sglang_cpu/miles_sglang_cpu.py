"""Imported at the start of the interpreter (miles_sglang_cpu.pth). Does nothing unless SGLANG_USE_CPU_ENGINE=1.

torchvision from PyPI is a CUDA build: beside a CPU build of torch its library cannot be loaded, and importing it fails
at the fakes of operators that the library would have defined. They are declared here just before it is imported.

SGLang's adapters ask for pinned memory, which torch refuses where there is no accelerator to copy to. Ordinary memory
is what they get.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_PINNING = ("tensor", "empty", "zeros", "ones", "full", "arange")


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in _OPERATORS:
                torch.library.define(f"torchvision::{operator}", _SCHEMA)
            _pin_nothing(torch)
        return None  # whoever is next finds it


def _pin_nothing(torch: ModuleType) -> None:
    """Constructors forget `pin_memory`, and pinning a tensor gives the tensor."""

    def without(construct: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(construct)
        def constructed(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
            return construct(*arguments, **options)

        return constructed

    for name in _PINNING:
        setattr(torch, name, without(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, _DeclareOperators())
