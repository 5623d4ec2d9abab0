"""The model's own step on fake tensors, and what it keeps in memory."""
