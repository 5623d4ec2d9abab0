"""The parts of a self-contained HTML page: no network, readable without JavaScript.

Every text goes through `escape`; a chart is SVG that matplotlib made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

_COPY = """\
for (const button of document.querySelectorAll("button[data-copies]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "selected: press Ctrl-C";
    }
  });
}"""
"""Buttons appear only where they work; without a clipboard the text is selected."""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole HTML page of `parts`, which are HTML."""
    css = resources.files("grpo_lite.report").joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in parts if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="grpo-lite">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
{body}
<script>
{_COPY}
</script>
</body>
</html>
"""


def section(title: str, *parts: str) -> str:
    """Return `parts` under a heading; empty without any."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def heading(text: str) -> str:
    """Return the page's one heading of the first order."""
    return f"<h1>{escape(text)}</h1>"


def paragraph(text: str, *, soft: bool = False) -> str:
    """Return a paragraph of plain text."""
    kind = ' class="soft"' if soft else ""
    return f"<p{kind}>{escape(text)}</p>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return figures that catch the eye: (name, value)."""
    cells = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return f'<dl class="facts">{"".join(cells)}</dl>'


def figure(svg: str, caption: str) -> str:
    """Return a chart with its caption."""
    return f"<figure>\n{svg}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    """Return a table; columns in `numbers` are set right."""

    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(heads))
    body = "\n".join(
        f"<tr>{''.join(cell('td', column, text) for column, text in enumerate(row))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def code(text: str, *, name: str) -> str:
    """Return text to paste elsewhere, with a copy button; `name` is unique on the page."""
    return (
        f'<pre><code id="{escape(name)}">{escape(text)}</code></pre>\n'
        f'<button type="button" data-copies="{escape(name)}" hidden>copy</button>'
    )


def bullets(texts: Iterable[str]) -> str:
    """Return a list of sentences; empty without any."""
    items = "\n".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>\n{items}\n</ul>" if items else ""
