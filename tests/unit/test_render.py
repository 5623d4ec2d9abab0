"""The report as people and programs see it: whole screens, kept in tests/golden.

A change of layout or wording shows there as a readable difference;
`pytest tests/unit/test_render.py --update-golden` rewrites them.
"""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_documents import DOCUMENTS, DOES_NOT_FIT, FITS
from rich.console import Console

from grpo_lite.errors import UsageError
from grpo_lite.plan import Category, Phase
from grpo_lite.report.document import Choice
from grpo_lite.report.peaks import PeakRow, peak_table
from grpo_lite.report.render import render, report_console
from grpo_lite.units import GIB, MIB

GOLDEN = Path(__file__).parents[1] / "golden"


def rendered(document, output_format="text", *, width=80, color=None):
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=color, force_terminal=bool(color))
    render(document, output_format, console)
    return file.getvalue()


def check_golden(name, text, request):
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    path = GOLDEN / name
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_screen_at_80_columns_is_the_golden_one(name, request):
    check_golden(f"{name}.txt", rendered(DOCUMENTS[name]), request)


@pytest.mark.parametrize("name", ["fits", "does-not-fit"])
def test_the_json_is_the_golden_one(name, request):
    check_golden(f"{name}.json", rendered(DOCUMENTS[name], "json"), request)


@pytest.mark.parametrize("width", [72, 80, 110, 200])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_line_is_wider_than_the_terminal_or_110_columns(name, width):
    """A bar that wraps is unreadable; the last line may be longer, so that it can be pasted."""
    *lines, _next_step = rendered(DOCUMENTS[name], width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 110)
    assert not any("\u2026" in line for line in lines)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_answer_stands_in_the_first_and_in_the_last_line(name):
    """After sixty lines the first has left the screen; nobody should scroll for the answer."""
    lines = rendered(DOCUMENTS[name]).splitlines()
    verdict = DOCUMENTS[name].verdict.upper()
    assert lines[0].startswith(verdict)
    assert lines[-1].startswith(verdict)
    assert len(lines) <= 66


def test_what_does_not_fit_leads_with_what_is_missing_and_flags_that_would():
    text = rendered(DOES_NOT_FIT)
    top = " ".join("\n".join(text.splitlines()[:9]).split())
    assert "101 GiB too little; backward needs 116 GiB of 14.7 GiB" in top
    assert "--method lora --max-completion-length 128" in top
    assert "GRPOConfig" not in text


def test_where_nothing_would_fit_the_report_says_so():
    text = rendered(replace(DOES_NOT_FIT, alternatives=()))
    assert "Nothing that was tried fits" in text
    assert text.splitlines()[-1] == "DOES NOT FIT  no flag makes it fit"


def test_names_in_square_brackets_are_shown_as_they_are():
    """Rich reads [words] as markup and swallows them; shapes and paths contain brackets."""
    document = replace(
        FITS,
        model="./[bold]my-model[/bold]",
        assumptions=("logits [rows, tokens]",),
        choices=(Choice(setting="[a]", value="[b]", reason="[c]"),),
    )
    text = rendered(document)
    for name in ("[bold]my-model[/bold]", "[rows, tokens]", "[a]", "[b]", "[c]"):
        assert name in text


def test_a_bar_has_as_many_letters_as_its_share_of_the_budget():
    text = rendered(FITS, width=110)
    (bar,) = (line.split()[4] for line in text.splitlines() if line.startswith("  > backward"))
    bar, end = bar.rstrip("|"), bar[-1]
    assert end == "|"
    used = len(bar.rstrip(".")) / len(bar)
    assert used == pytest.approx(
        FITS.chosen.memory.allocated_peak_bytes / FITS.budget.card_bytes, abs=1 / len(bar)
    )
    assert bar.count("A") / len(bar) == pytest.approx(8.65 / 14.72, abs=1 / len(bar))


def test_colour_is_off_with_no_color_and_off_a_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    render(FITS, "text", console)
    assert not re.search(r"\x1b\[[0-9;]*[34]\d", console.file.getvalue())
    assert "\x1b" not in rendered(FITS)
    monkeypatch.delenv("NO_COLOR")
    assert re.search(r"\x1b\[[0-9;]*[34]\d", rendered(FITS, color="standard"))


def test_a_file_is_80_columns_wide_whatever_the_terminal_is(monkeypatch):
    """A report piped to a file must not depend on the window it was made in."""
    monkeypatch.setenv("COLUMNS", "200")
    console = report_console(io.StringIO())
    render(FITS, "text", console)
    assert console.file.getvalue() == rendered(FITS, width=80)


def test_the_trl_arguments_can_be_pasted_into_python():
    text = rendered(replace(FITS, assumptions=()))
    code = text[text.index("config = GRPOConfig(") : text.index("FITS  recipe")]
    names = {"GRPOConfig": dict}
    exec(code, names)  # as a user does
    assert names["config"] == FITS.trl_arguments


def test_the_next_command_is_one_line_and_quotes_the_path():
    path = "/a long/" + "path/" * 20 + "recipe.toml"
    last = rendered(replace(FITS, recipe_path=path)).splitlines()[-1]
    assert last.endswith(f"grpo-lite train '{path}'")


def test_the_json_has_bytes_as_ints_and_the_same_peak_as_the_screen():
    data = json.loads(rendered(FITS, "json"))
    assert data["schema"] == 1
    assert data["verdict"] == "fits"
    assert data["peak_bytes"] == FITS.chosen.memory.allocated_peak_bytes
    assert data["missing_bytes"] == 0
    for row in data["phases"]:
        categories = [row[f"{category}_bytes"] for category in Category]
        assert all(isinstance(num_bytes, int) for num_bytes in categories)
        assert sum(categories) == row["peak_bytes"]


def test_every_key_of_the_json_is_documented():
    documented = (Path(__file__).parents[2] / "docs" / "report-json.md").read_text()
    data = json.loads(rendered(FITS, "json"))
    nested = [
        key
        for name in ("phases", "largest_at_peak", "choices", "alternatives")
        for key in data[name][0]
    ]
    per_category = {f"{category}_bytes" for category in Category}
    assert [
        key for key in [*data, *nested] if f"`{key}`" not in documented and key not in per_category
    ] == []


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(UsageError, match="known: html, json, markdown, text"):
        render(FITS, "pdf", report_console(io.StringIO()))


def test_the_table_of_peaks_is_the_golden_one(request):
    rows = [
        PeakRow(
            phase=Phase.LOAD,
            planned_bytes=513 * MIB,
            predicted_bytes=513 * MIB,
            measured_bytes=513 * MIB,
        ),
        PeakRow(
            phase=Phase.BACKWARD,
            planned_bytes=round(2.91 * GIB),
            predicted_bytes=round(2.62 * GIB),
            measured_bytes=round(2.64 * GIB),
        ),
        PeakRow(phase=Phase.SAVE, planned_bytes=0, predicted_bytes=0, measured_bytes=0),
    ]
    file = io.StringIO()
    report_console(file).print(peak_table(rows))
    check_golden("peaks.txt", file.getvalue(), request)
