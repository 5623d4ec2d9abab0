"""Bytes and seconds of a plan, computed from a footprint; pure, imports no torch."""
