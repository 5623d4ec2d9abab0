"""grpo-lite: a memory governor for GRPO on one consumer GPU."""
