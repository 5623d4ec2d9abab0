"""A training loop of one's own under the governor: one line instead of backward, step, zero_grad.

Runs anywhere: the card is a budget over CPU memory, too small for all rows at once.
On a GPU, `Governor()` takes the card that is there.
"""

import torch

from grpo_lite import Governor

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
target = torch.randn(32)


def loss_fn(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of these rows; the governor decides how many there are."""
    error: torch.Tensor = model(rows["inputs"]).squeeze(-1) - rows["targets"]
    return error.square().mean()


governor = Governor("virtual:1500KiB")
for step in range(20):
    inputs = torch.randn(256, 32)
    batch = {"inputs": inputs, "targets": inputs @ target}
    loss = governor.accumulate(batch, loss_fn, optimizer, max_grad_norm=1.0)
    if step % 5 == 0:
        rows = governor.records["backward"].num_rows
        print(f"step {step}: loss {loss:.3f}, {rows} of 256 rows at once")
print(f"{governor.num_rescues} out-of-memory errors survived")
for decision in governor.decisions:
    print(f"  update {decision.step}, {decision.phase}: {decision.change} ({decision.reason})")
