"""A report in the format that was asked for, written to where it was asked for.

A format is added by adding a row to RENDERERS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from rich.console import Console

from grpo_lite.errors import unknown_name
from grpo_lite.report.as_json import document_to_json
from grpo_lite.report.document import Document
from grpo_lite.report.html import document_to_html
from grpo_lite.report.markdown import document_to_markdown
from grpo_lite.report.terminal import document_screen, next_step

PLAIN_WIDTH = 80
"""Columns where the output is no terminal."""
MAX_WIDTH = 110
"""Columns of the widest screen: longer lines are hard to read."""


def report_console(file: IO[str]) -> Console:
    """Return a console on `file`; it obeys NO_COLOR and is 80 columns wide off a terminal."""
    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def render(document: Document, output_format: str, console: Console) -> None:
    """Write `document` to `console` in one of RENDERERS.

    Raises:
        UsageError: no format has that name.
    """
    if output_format not in RENDERERS:
        raise unknown_name("format", output_format, RENDERERS)
    RENDERERS[output_format](document, console)


def _render_text(document: Document, console: Console) -> None:
    width = min(console.width, MAX_WIDTH)
    console.print(document_screen(document, width=width), width=width)
    console.print(next_step(document), soft_wrap=True)  # a command that folds cannot be pasted


def _render_json(document: Document, console: Console) -> None:
    console.file.write(document_to_json(document))


def _render_markdown(document: Document, console: Console) -> None:
    console.file.write(document_to_markdown(document))


def _render_html(document: Document, console: Console) -> None:
    console.file.write(document_to_html(document))


RENDERERS: dict[str, Callable[[Document, Console], None]] = {
    "text": _render_text,
    "json": _render_json,
    "markdown": _render_markdown,
    "html": _render_html,
}
"""The formats, by name."""
