"""The optimizers that a Workload can name, as rows: what they keep per parameter and their class.

Knows bytes and a constructor's name; imports no torch.
An optimizer is added by adding a row.
"""

from dataclasses import dataclass

from grpo_lite.errors import unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """One optimizer, by the name that TRL's `optim` argument uses."""

    name: str
    """TRL's and transformers' word."""
    state_bytes_per_parameter: float
    """Bytes of state for each trained fp32 parameter."""
    constructor: str
    """The class as "module:Class"."""
    arguments: tuple[tuple[str, object], ...] = ()
    """Keyword arguments that make the class this row."""


ROWS = {
    row.name: row
    for row in (
        OptimizerRow(
            name="adamw_torch_fused",
            state_bytes_per_parameter=8,
            constructor="torch.optim:AdamW",
            arguments=(("fused", True),),
        ),
    )
}


def optimizer_row(name: str) -> OptimizerRow:
    """Return the row called `name`.

    Raises:
        UsageError: no row has that name; the known ones are listed.
    """
    if name not in ROWS:
        raise unknown_name("optimizer", name, ROWS)
    return ROWS[name]
