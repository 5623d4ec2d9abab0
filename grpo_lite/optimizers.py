"""The optimizers that a Workload can name, as rows: what they keep per parameter and their class.

Knows bytes and a constructor's name; imports no torch.
An optimizer is added by adding a row.
"""

from dataclasses import dataclass

from grpo_lite.errors import unknown_name

BLOCK_BYTES = 2**27
"""Gradient bytes that are stepped at once; a larger tensor is stepped alone."""
MIN_8BIT_ELEMENTS = 4096
"""bitsandbytes' min_8bit_size: smaller tensors keep fp32 states."""
MIN_PAGED_ELEMENTS = 100_000
"""bitsandbytes pages the states of tensors from this size on (optim.optimizer.get_state_buffer)."""
STATE_BLOCK_SIZE = 256
"""bitsandbytes' blocksize of 8-bit optimizer states."""


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
    block_size: int | None = None
    """Elements that share one fp32 scale where states are kept in 8 bits; None for wide states."""
    is_paged: bool = False
    """Whether states lie in managed memory, outside torch's allocator."""
    makes_temporaries: bool = False
    """Whether a step makes copies of all second moments at once (torch's foreach kernels)."""

    def state_tensor_bytes(self, numel: int, item_bytes: int) -> tuple[int, ...]:
        """Return the bytes of each state tensor on the card of a trained tensor.

        Torch keeps two moments in the tensor's own dtype. bitsandbytes keeps tensors below
        MIN_8BIT_ELEMENTS in fp32, and pages only those above MIN_PAGED_ELEMENTS.
        """
        if self.block_size is None:
            return (numel * item_bytes,) * 2
        if self.is_paged and numel >= MIN_PAGED_ELEMENTS:
            return ()
        if numel < MIN_8BIT_ELEMENTS:
            return (4 * numel,) * 2
        scales = 4 * -(-numel // self.block_size)
        return (numel, numel, scales, scales)


ROWS = {
    row.name: row
    for row in (
        OptimizerRow(
            name="adamw_torch_fused",
            state_bytes_per_parameter=8,
            constructor="torch.optim:AdamW",
            arguments=(("fused", True),),
        ),
        OptimizerRow(
            name="adamw_torch",
            state_bytes_per_parameter=8,
            constructor="torch.optim:AdamW",
            makes_temporaries=True,
        ),
        OptimizerRow(
            name="adamw_bnb_8bit",
            state_bytes_per_parameter=2 + 8 / STATE_BLOCK_SIZE,
            constructor="bitsandbytes.optim:AdamW8bit",
            block_size=STATE_BLOCK_SIZE,
        ),
        OptimizerRow(
            name="paged_adamw_8bit",
            state_bytes_per_parameter=0,
            constructor="bitsandbytes.optim:PagedAdamW8bit",
            block_size=STATE_BLOCK_SIZE,
            is_paged=True,
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
