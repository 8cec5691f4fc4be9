"""What a scenario draws from: constant, exponential, log-normal, a list of values, or what a run measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from miles_core.config.sections import Section

__all__ = ["Distribution", "Drawn", "constant"]

_KINDS = ("value", "mean", "median", "values", "from_run")


class Distribution(Section):
    """Numbers ≥ 0: one of `value`, `mean`, `median`, `values`, `from_run`. A bare number is short for `value`."""

    value: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Always this."""

    mean: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Exponential with this mean."""

    median: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Log-normal with this median."""

    sigma: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Log-normal: standard deviation of the logarithm."""

    values: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """Any of these, equally likely."""

    from_run: Path | None = None
    """Any of what this run directory measured, equally likely."""

    at_most: float = Field(default=float("inf"), gt=0)
    """What is drawn above this is this."""

    _measured: NDArray[np.float64] | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _one_kind(self) -> Distribution:
        given = [name for name in _KINDS if getattr(self, name) not in (None, ())]
        if len(given) != 1:
            said = " and ".join(given) if given else "nothing"
            raise ValueError(f"give one of {', '.join(_KINDS)}; this gives {said}")
        if "sigma" in self.model_fields_set and self.median is None:
            raise ValueError("sigma belongs to median (log-normal)")
        return self

    def measured(self, values: NDArray[np.float64]) -> Distribution:
        """The same, with the values that `from_run` stands for."""
        copy = self.model_copy()
        copy._measured = values
        return copy

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Float64 of that shape."""
        if self.value is not None:
            drawn = np.full(shape, self.value)
        elif self.mean is not None:
            drawn = generator.exponential(self.mean, shape)
        elif self.median is not None:
            drawn = generator.lognormal(np.log(self.median), self.sigma, shape)
        else:
            assert self.from_run is None or self._measured is not None, "read the run before drawing"
            pool = np.asarray(self.values) if self._measured is None else self._measured
            drawn = pool[generator.integers(len(pool), size=shape)]
        capped: NDArray[np.float64] = np.minimum(drawn, self.at_most)
        return capped


def _bare(value: object) -> object:
    return {"value": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


Drawn = Annotated[Distribution, BeforeValidator(_bare)]
"""A distribution in a scenario; a bare number is a constant."""


def constant(value: float) -> Any:
    """Default of a field that is a distribution."""
    return Field(default=Distribution(value=value), validate_default=True)
