"""The report: one page without outside resources, which a real browser shows without a complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from miles_core.runs.directory import RunDirectory
from miles_core.runs.report.charts import bars, curve, timeline
from miles_core.runs.report.page import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
)


class _Balanced(HTMLParser):
    """Counts that every opened element is closed."""

    void = frozenset({"meta", "br", "line", "circle", "polyline", "polygon", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def test_the_page_says_what_the_run_was(finished_run: Path, tmp_path: Path) -> None:
    page = write_report(RunDirectory.open(finished_run, write=False), tmp_path / "r.html").read_text()
    for part in ("held-out reward", "Timeline", "Fidelity", "sampled and trained", "examples/tiny.toml:", "torch"):
        assert part in page, part
    parser = _Balanced()
    parser.feed(page)
    assert not parser.open


def test_what_was_zero_throughout_is_said_and_not_drawn(finished_run: Path, tmp_path: Path) -> None:
    page = write_report(RunDirectory.open(finished_run, write=False), tmp_path / "r.html").read_text()
    assert "<figcaption>loss</figcaption>" in page
    assert "<figcaption>largest staleness of a trained group</figcaption>" not in page
    assert re.search("Zero throughout: [^<]*largest staleness of a trained group", page)


def test_names_of_lines_that_end_together_stand_apart() -> None:
    chart = curve({"a": [(0, 0, 0), (1, 1, 0)], "b": [(0, 0, 0), (1, 0.99, 0)]}, title="t")
    heights = [float(y) for y in re.findall(r'class="name[^>]* y="([0-9.]+)"', chart)]
    assert len(heights) == 2
    assert abs(heights[0] - heights[1]) >= 12


def test_nothing_comes_from_outside(finished_run: Path, tmp_path: Path) -> None:
    page = write_report(RunDirectory.open(finished_run, write=False), tmp_path / "r.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)|@import|url\(""", page)


def test_what_is_written_in_a_run_is_shown_and_not_executed(run_copy: Path, tmp_path: Path) -> None:
    (run_copy / "environment.json").write_text('{"started": "<script>alert(1)</script>", "packages": {}}')
    page = write_report(RunDirectory.open(run_copy, write=False), tmp_path / "r.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
def test_a_browser_draws_it(finished_run: Path, tmp_path: Path) -> None:
    page = write_report(RunDirectory.open(finished_run, write=False), tmp_path / "r.html")
    assert BROWSER is not None
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shot = tmp_path / "shot.png"
    command = [BROWSER, *FLAGS, profile, "--window-size=1000,2400", f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert shot.stat().st_size > 30_000, "a page with charts and text does not compress to less"
    dumped = subprocess.run(
        [BROWSER, *FLAGS, profile, "--dump-dom", page.as_uri()], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert dumped.count("<svg") >= 6
    assert "hard mismatches" in dumped.lower()


def test_charts_of_degenerate_data() -> None:
    assert curve({}, title="none") == ""
    assert curve({"a": []}, title="none") == ""
    assert "polyline" in curve({"a": [(1.0, 2.0, 0.0)]}, title="one point")
    assert "polyline" in curve({"a": [(1.0, 0.0, 0.0), (2.0, 0.0, 0.0)]}, title="constant zero")
    assert "polygon" in curve({"a": [(1.0, 1.0, 0.2), (2.0, 2.0, 0.1)]}, title="band")
    assert bars({}, title="none") == ""
    assert "rect" in bars({"<b>": 0.0}, title="zero")
    assert "<b>" not in bars({"<b>": 0.0}, title="zero")
    assert timeline([], title="none") == ""
    assert "rect" in timeline([("a", "x", 0, 5.0, 5.0)], title="instant")
