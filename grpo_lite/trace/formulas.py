"""Numbers seen at a few shapes -> the one formula in the variables of a footprint behind them.

A size in a trace is a product of dimensions, or a sum of few such products (a last chunk is what
full chunks leave).
The formula with the fewest terms that reproduces every number exactly is it; there is no fitting,
and what has no such formula is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import combinations

import numpy as np

from grpo_lite.predict.footprint import VARIABLES, Monomial, Shape

_EXPONENTS: tuple[Monomial, ...] = (
    (0, 0, 0, 0, 0),
    (1, 0, 0, 0, 0),
    (0, 1, 0, 0, 0),
    (1, 1, 0, 0, 0),
    (0, 0, 1, 0, 0),
    (1, 0, 1, 0, 0),
    (0, 0, 0, 1, 0),
    (0, 0, 0, 0, 1),
    (0, 2, 0, 0, 0),
    (1, 2, 0, 0, 0),
)
"""What tensors and operations of a step can be proportional to: tokens squared is a mask or eager
attention, all others are counts of rows, tokens and chunks."""

_MAX_TERMS = 2


class NoFormula(Exception):
    """No short formula reproduces the numbers exactly."""


class Solver:
    """Finds formulas for numbers that were seen at `shapes`, in their order."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = tuple(shapes)
        self._known: dict[tuple[int, ...], dict[Monomial, float]] = {}

    @cached_property
    def _columns(self) -> np.ndarray:
        rows = [[shape.monomial(e) for e in _EXPONENTS] for shape in self._shapes]
        return np.array(rows, dtype=np.float64)

    def solve(self, values: Sequence[int]) -> dict[Monomial, float]:
        """Return the coefficients by monomial of the shortest exact formula for `values`.

        Raises:
            NoFormula: none with up to 2 terms reproduces every value.
        """
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._search(np.array(values, dtype=np.float64))
        return self._known[key]

    def _search(self, values: np.ndarray) -> dict[Monomial, float]:
        if not values.any():
            return {}
        tolerance = 1e-9 * float(np.abs(values).max())
        for num_terms in range(1, _MAX_TERMS + 1):
            for chosen in combinations(range(len(_EXPONENTS)), num_terms):
                columns = self._columns[:, chosen]
                factors, _, rank, _ = np.linalg.lstsq(columns, values, rcond=None)
                rounded = np.round(factors * 2) / 2
                exact = np.abs(columns @ rounded - values).max() <= tolerance
                if rank == num_terms and exact and rounded.all():
                    return {
                        _EXPONENTS[column]: float(factor)
                        for column, factor in zip(chosen, rounded, strict=True)
                    }
        raise NoFormula(f"no formula in {', '.join(VARIABLES)} gives {values.tolist()}")

    def words(self, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return one dimension of a tensor in words, as factors: ("rows", "tokens")."""
        try:
            formula = self.solve(sizes)
        except NoFormula:
            return (str(sizes[-1]),)
        if len(formula) != 1:
            return (_sum_in_words(formula),)
        (exponents, factor), *_ = formula.items()
        names = [
            name for name, power in zip(VARIABLES, exponents, strict=True) for _ in range(power)
        ]
        return (*names, f"{factor:g}") if factor != 1 or not names else tuple(names)


def _sum_in_words(formula: dict[Monomial, float]) -> str:
    parts = []
    for exponents, factor in formula.items():
        names = [
            name for name, power in zip(VARIABLES, exponents, strict=True) for _ in range(power)
        ]
        product = " ".join(names) if names else f"{abs(factor):g}"
        scaled = product if abs(factor) == 1 or not names else f"{abs(factor):g} {product}"
        parts.append(("-" if factor < 0 else "+") + " " + scaled)
    return "(" + " ".join(parts).removeprefix("+ ") + ")"
