"""The report as a page: one file, no network, the same without JavaScript, nothing injected."""

import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_documents import DOCUMENTS, FITS

from grpo_lite.frontier import frontier
from grpo_lite.report.document import Alternative
from grpo_lite.report.html import document_to_html
from grpo_lite.report.markdown import document_to_markdown
from grpo_lite.report.render import render, report_console
from grpo_lite.search import Verdict
from grpo_lite.units import GIB

FRONTIER = tuple(
    Alternative(
        description=f"micro-batch {rows}",
        flags="",
        peak_bytes=round(peak_gib * GIB),
        seconds=seconds,
        verdict=Verdict.FITS,
    )
    for rows, peak_gib, seconds in (
        (1, 5.0, 120.0),
        (4, 8.6, 44.0),
        (8, 13.4, 41.0),
        (16, 22.4, 39),
    )
)
RICH = replace(FITS, frontier=FRONTIER, recipe_text='model = "x"\n[plan]\nmicro_batch = 8\n')
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Tags(HTMLParser):
    """Collects tags, ids, and what is read without JavaScript; void tags need no end."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, page):
        super().__init__()
        self.open, self.names, self.ids, self.addresses, self.text = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_tag_is_closed_and_every_id_is_its_own(name):
    """Charts share ids by default: the second chart then draws with the first one's clips."""
    tags = Tags(document_to_html(DOCUMENTS[name]))
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))


def test_nothing_is_fetched():
    tags = Tags(document_to_html(RICH))
    assert all(address.startswith(("#", "data:")) for address in tags.addresses)
    assert not re.search(r"url\((?!#)|@import|<img|<iframe", document_to_html(RICH))


def test_the_page_says_what_the_terminal_says():
    text = "".join(Tags(document_to_html(RICH)).text)
    for words in (
        "FITS",
        "13.4 GiB of 14.7 GiB",
        "84 tensors x 8 rows x 768 tokens x 8960 x 2 bytes",
        "16 would need 22.4 GiB in backward",
        "--max-completion-length 1024",
        "per_device_train_batch_size=8",
        "the time of the reward functions is unknown",
        "micro_batch = 8",
    ):
        assert words in text


def test_there_is_a_chart_for_memory_time_and_the_frontier():
    assert document_to_html(RICH).count("<svg ") == 3
    assert document_to_html(DOCUMENTS["does-not-fit"]).count("<svg ") == 2


def test_no_colour_of_the_charts_is_fixed():
    """A fixed black disappears on dark paper."""
    charts = "".join(re.findall(r"<svg.*?</svg>", document_to_html(RICH), flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", charts)) <= {"#000000", "#ffffff"}
    variables = set(re.findall(r"var\(--(\w+)\)", charts))
    style = document_to_html(RICH).partition("</style>")[0]
    assert all(f"--{name}:" in style for name in variables)


def test_a_name_from_outside_cannot_become_markup():
    evil = '<script>alert("x")</script>|`*'
    document = replace(RICH, model=evil, recipe_text=f"model = '{evil}'")
    page = document_to_html(document)
    assert page.count("<script>") == 1  # our own
    assert "&lt;script&gt;" in page
    assert Tags(page).open == []
    assert "<script>" not in document_to_markdown(document).partition("```")[0].replace("\\<", "")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_markdown_tables_have_as_many_cells_in_every_row(name):
    lines = document_to_markdown(DOCUMENTS[name]).splitlines()
    columns = 0
    for line in lines:
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (cells and columns) or cells == columns, line
        columns = cells
    assert any(line.startswith(f"# {DOCUMENTS[name].verdict.upper()}") for line in lines)


@pytest.mark.parametrize("output_format", ["html", "markdown"])
def test_the_formats_are_rendered_by_name(output_format):
    text = io.StringIO()
    render(RICH, output_format, report_console(text))
    assert text.getvalue().endswith("\n")
    assert "Qwen2.5-1.5B-Instruct" in text.getvalue()


def test_two_reports_of_the_same_answer_are_the_same_bytes():
    """Dates and random ids would make every saved report differ."""
    assert document_to_html(RICH) == document_to_html(RICH)


def test_the_frontier_keeps_only_what_nothing_beats():
    def candidate(peak_gib, seconds):
        chosen = FITS.chosen
        factor = peak_gib * GIB / chosen.memory.allocated_peak_bytes
        phases = tuple(
            replace(phase, allocated_bytes=round(phase.allocated_bytes * factor))
            for phase in chosen.memory.phases
        )
        speed = replace(
            chosen.speed, phases=(replace(chosen.speed.phases[0], seconds=float(seconds)),)
        )
        return replace(chosen, memory=replace(chosen.memory, phases=phases), speed=speed)

    found = frontier([candidate(4, 9), candidate(3, 10), candidate(5, 9.5), candidate(8, 2)])
    assert [other.seconds for other in found] == [10.0, 9.0, 2.0]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", ["rich", "does-not-fit"])
def test_a_browser_shows_it_without_a_console_error(name, tmp_path):
    """A page that parses can still throw, or draw charts of no height."""
    document = RICH if name == "rich" else DOCUMENTS[name]
    probe = (
        "<script>document.title = [...document.querySelectorAll('svg')].map("
        "svg => Math.round(svg.getBoundingClientRect().height)).join(' ')"
        " + ' buttons ' + [...document.querySelectorAll('button')].filter(b => !b.hidden).length;"
        "</script></body>"
    )
    file = tmp_path / "report.html"
    file.write_text(document_to_html(document).replace("</body>", probe), encoding="utf-8")
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'browser'}",
            "--enable-logging=stderr", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout).group(1)
    heights, _, buttons = title.partition(" buttons ")
    assert len(heights.split()) == (3 if name == "rich" else 2)
    assert all(int(height) > 80 for height in heights.split())
    assert int(buttons) == (2 if name == "rich" else 0)
