"""JupyterLab as a reader opens it: a browser, a click on Run All Cells, and a look at what is on the screen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import pytest
from browser import ROOT, keep_screenshot, need_browser, open_page, worst_contrast

pytestmark = [pytest.mark.doors, pytest.mark.timeout(900)]
NOTEBOOKS = ["00_start_here", "08_locate", "12_casebook", "13_full_run"]
THEMES = ["JupyterLab Light", "JupyterLab Dark"]
FIRST_NAN = 30  # seconds from opening notebook 00 to the first NaN on the screen
READABLE = 4.5  # WCAG 2.2, 1.4.3
# What the other tests set for their own sake: a reader has none of it.
OURS = re.compile("PYTEST|TRL_EXPERIMENTAL_SILENCE|TOKENIZERS_PARALLELISM|NANLAB")


def blank_copy(name: str, folder: Path) -> nbformat.NotebookNode:
    """A notebook without its outputs in `folder`, so that what shows later is of this run; the original."""
    original = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    copy = nbformat.from_dict(original)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(copy, folder / f"{name}.ipynb")
    return original


@contextmanager
def jupyterlab(folder: Path, notebooks: Path) -> Iterator[tuple[str, str]]:
    """Address and token of a JupyterLab over `notebooks`, with fresh settings, on a free port of this machine."""
    env = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    env["NANLAB_SCALE"] = "tiny"  # a GPU would take full, and minutes
    for kind in ("CONFIG", "DATA", "RUNTIME"):
        env[f"JUPYTER_{kind}_DIR"] = str(folder / kind.lower())
    answer = folder / "user_settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    answer.parent.mkdir(parents=True)
    answer.write_text('{"fetchNews": "false"}', encoding="utf-8")  # or a question lies over the notebook
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    command += [f"--LabApp.{part}_dir={folder / part}" for part in ("user_settings", "workspaces")]
    with open(folder / "server.log", "w+", encoding="utf-8") as log:
        server = subprocess.Popen([*command, str(notebooks)], env=env, stdout=log, stderr=log, cwd=notebooks)
        try:
            yield _address(folder / "runtime", server, log.name)
        finally:
            server.terminate()
            server.wait(timeout=60)


def _address(runtime: Path, server: subprocess.Popen, log: str) -> tuple[str, str]:
    """What the server itself wrote about where it listens, once it answers."""
    for _ in range(600):
        assert server.poll() is None, Path(log).read_text(encoding="utf-8")
        for file in runtime.glob("jpserver-*.json"):
            with suppress(json.JSONDecodeError):  # half written
                told = json.loads(file.read_text(encoding="utf-8"))
                if answers(told["url"], told["token"]) == 200:
                    return told["url"], told["token"]
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start: {Path(log).read_text(encoding='utf-8')}")


def answers(url: str, token: str) -> int:
    """The status of a request for the list of files; 0 where nobody listens yet."""
    request = urllib.request.Request(f"{url}api/contents", headers={"Authorization": f"token {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return 0


def choose(page, *names: str) -> None:
    """Click through the main menu, as in choose(page, "Run", "Run All Cells")."""
    page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{names[0]}$")).click()
    for name in names[1:]:
        page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{name}$")).click()


def run_all(page) -> None:
    page.get_by_text(re.compile(r"^Python 3 .*\| Idle$")).wait_for()  # the status bar: the kernel has answered
    choose(page, "Run", "Run All Cells")


def wait_until_done(page, timeout: int) -> None:
    """Every code cell whose prompt shows (a folded one has none) carries a number, and the kernel is idle."""
    page.wait_for_function(
        """() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt:not(.jp-Placeholder-prompt)')]
             .every(prompt => /^\\[\\d+\\]:$/.test(prompt.textContent.trim()))
           && document.querySelector('.jp-Notebook-ExecutionIndicator').dataset.status == 'idle'""",
        timeout=timeout * 1000,
    )


def check_saved(saved: nbformat.NotebookNode, original: nbformat.NotebookNode) -> None:
    """The run left what the committed notebook shows: no other error, nothing on stderr, every figure with its text.

    JupyterLab 4.6 keeps a figure's alternative text in the notebook and does not pass it on to the page.
    """
    counts = [cell.execution_count for cell in saved.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "not every cell ran, once and in order"
    alts = []
    for cell, was in zip(saved.cells, original.cells, strict=True):
        kinds, expected = ([o.output_type for o in c.get("outputs", [])] for c in (cell, was))
        assert kinds.count("error") == expected.count("error"), cell
        assert not any(output.get("name") == "stderr" for output in cell.get("outputs", [])), cell
        assert kinds.count("display_data") == expected.count("display_data"), cell
        alts += [o.metadata["image/png"].alt for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert all(len(alt) > 20 for alt in alts), alts


def bring(locator):
    """Scrolls until the element is on the screen, and drawn: JupyterLab draws only what is near."""
    for _ in range(100):
        locator.evaluate("e => e.scrollIntoView({block: 'start'})")
        locator.page.wait_for_timeout(100)
        if locator.evaluate(
            """e => { const box = e.getBoundingClientRect(); return box.height > 0 && box.bottom > 0
                 && box.top < innerHeight && e.checkVisibility({contentVisibilityAuto: true}); }"""
        ):
            return
    raise AssertionError(f"never on the screen: {locator.evaluate('e => e.outerHTML')[:200]}")


def check_screen(page, original: nbformat.NotebookNode) -> None:
    """No error, every figure drawn, cards and outputs readable, solutions folded."""
    outputs = [output for cell in original.cells for output in cell.get("outputs", [])]
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    errors = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
    assert errors.count() == sum(output.output_type == "error" for output in outputs), errors.all_text_contents()

    figures = page.locator(".jp-OutputArea img")
    assert figures.count() == sum("image/png" in output.get("data", {}) for output in outputs)
    for figure in figures.all():
        bring(figure)
        assert figure.evaluate("async image => (await image.decode(), image.naturalWidth)") > 100

    cards = page.locator(".jp-OutputArea section", has_text="locate: ")
    assert cards.count() == sum("<h4" in output.get("data", {}).get("text/html", "") for output in outputs)
    for card in cards.all():
        bring(card)
        assert re.search(r"locate: .+What.+Advice", card.inner_text(), re.DOTALL), "the card is not all there"
        worst = worst_contrast(card)
        assert worst["ratio"] >= READABLE, worst
    for area in page.locator(".jp-OutputArea-output").all():
        worst = worst_contrast(area)
        assert worst["ratio"] >= READABLE, worst
    check_folds(page, original)


def check_folds(page, original: nbformat.NotebookNode) -> None:
    cells = page.locator(".jp-Notebook .jp-Cell")
    assert cells.count() == len(original.cells)
    for number, cell in enumerate(original.cells):
        if "solution" in cell.metadata.get("tags", []):
            assert not cells.nth(number).locator(".cm-content").is_visible(), f"cell {number} gives the solution away"
            line = cells.nth(number).locator(".jp-InputPlaceholder")  # it shows the first line of what is folded
            bring(line)
            assert line.is_visible()
            assert "check_" not in line.text_content(), f"the first line of cell {number} is the solution"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_from_the_menu_and_reads_well_in_both_themes(name, tmp_path):
    need_browser()
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    original = blank_copy(name, notebooks)
    others = max(1.0, os.getloadavg()[0] / os.cpu_count())  # a machine that is busy already is that much slower
    begin = time.monotonic()
    with jupyterlab(tmp_path, notebooks) as (url, token), open_page() as page:
        assert answers(url, "") == 403, "the server answers without its token"
        opened = time.monotonic()
        page.goto(f"{url}lab/tree/{name}.ipynb?token={token}")
        run_all(page)
        if name.startswith("00"):
            page.locator(".jp-OutputArea-output", has_text=re.compile(r"\bnan\b")).first.wait_for()
            seconds = time.monotonic() - opened
            print(
                f"\nfirst NaN {seconds:.1f} s after opening, {time.monotonic() - begin:.1f} s with the server's start"
            )
            assert seconds <= FIRST_NAN * others
        wait_until_done(page, timeout=600)
        print(f"\n{name}: {time.monotonic() - opened:.1f} s from opening to the last cell")
        choose(page, "File", "Save Notebook")
        page.wait_for_function("document.querySelector('.jp-mod-current.jp-mod-dirty') === null")
        check_saved(nbformat.read(notebooks / f"{name}.ipynb", as_version=4), original)
        for theme in THEMES:
            choose(page, "Settings", "Theme", theme)
            dark = theme.endswith("Dark")
            page.locator(f'body[data-jp-theme-light="{"false" if dark else "true"}"]').wait_for(state="attached")
            check_screen(page, original)
            keep_screenshots(page, f"lab_{name}_{'dark' if dark else 'light'}")
        assert page.strangers == [], "the page asked for something outside this machine"


def keep_screenshots(page, name: str) -> None:
    """The top, the first card and the first figure, where there are any."""
    bring(page.locator(".jp-Notebook .jp-Cell").first)
    keep_screenshot(page, name)
    for what, selector in {"card": ".jp-OutputArea section", "figure": ".jp-OutputArea img"}.items():
        first = page.locator(selector).first
        if first.count():
            bring(first)
            keep_screenshot(page, f"{name}_{what}")


def test_the_contrast_is_that_of_wcag():
    known = {
        "color: #767676; background: #fff": 4.54,
        "color: #777; background: #fff": 4.48,
        "color: #000; background: #fff": 21.0,
        "color: rgb(0 0 0 / 50%); background: #fff": 3.98,
        "color: #fff; background: transparent": 1.0,
    }
    with open_page() as page:
        for style, ratio in known.items():
            page.set_content(f"<p style='{style}'>text</p>")
            assert worst_contrast(page.locator("p"))["ratio"] == pytest.approx(ratio, abs=0.01)
