"""Gradient blocks and optimizer state: where they live and how they are stepped."""
