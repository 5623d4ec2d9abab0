"""Flags and value types that several commands share."""

from __future__ import annotations

import argparse

from grpo_lite.units import parse_bytes


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def size(text: str) -> int:
    """Return bytes from a size such as 500MiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add -v."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show notices of the libraries underneath"
    )
