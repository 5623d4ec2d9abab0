"""The plain way out of core, to be compared with: torch's AdamW over memory-mapped state."""

import os

import torch


class MappedAdamW:
    """torch.optim.AdamW whose masters and moments are memory-mapped files, cold at each step.

    Pages are written back and dropped after each step, as they are where RAM is short.
    """

    def __init__(self, folder, weights):
        self._weights = weights
        self._files = []
        masters = [torch.nn.Parameter(self._map(folder, p)) for p in weights]
        self._optimizer = torch.optim.AdamW(masters, fused=True)
        self._masters = masters
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.detach())
            self._optimizer.state[master] = {
                "step": torch.zeros(()),
                "exp_avg": self._map(folder, weight),
                "exp_avg_sq": self._map(folder, weight),
            }
            master.grad = torch.full_like(weight, 1e-3, dtype=torch.float32)

    def _map(self, folder, like):
        path = folder / f"mapped-{len(self._files)}"
        tensor = torch.from_file(str(path), shared=True, size=like.numel(), dtype=torch.float32)
        tensor.zero_()
        self._files.append(path)
        return tensor

    def step(self):
        """Step, set the weights, write pages back and drop them."""
        self._optimizer.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.data.copy_(master.data)
        for path in self._files:
            fd = os.open(path, os.O_RDWR)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
