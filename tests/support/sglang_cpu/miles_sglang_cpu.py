"""Imported at the start of the interpreter (miles_sglang_cpu.pth). Does nothing unless SGLANG_USE_CPU_ENGINE=1.

torchvision from PyPI is a CUDA build: beside a CPU build of torch its library cannot be loaded, and importing it fails
at the fakes of operators that the library would have defined. They are declared here just before it is imported.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in _OPERATORS:
                torch.library.define(f"torchvision::{operator}", _SCHEMA)
        return None  # whoever is next finds it


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, _DeclareOperators())
