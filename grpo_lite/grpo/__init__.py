"""The GRPO algorithm: rollout, objective, rewards, data."""
