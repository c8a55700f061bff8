"""The web page (make site), looked at as files and in a browser, on a phone and on a desk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser import ROOT, keep_screenshot, need, open_page, served, worst_contrast
from bs4 import BeautifulSoup

import nanlab
import nanlab.course.notebook

pytestmark = [pytest.mark.doors, pytest.mark.timeout(420)]
SIZES = {"phone": (390, 844), "desktop": (1280, 800)}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = ["index", "api", "claims", "versions", "cheatsheet", "glossary", "instructor", "distributed"]
LOOKED_AT = ["docs/index", "docs/cheatsheet", "notebooks/03_empty_batch", "notebooks/06_fp16_overflow", "docs/versions"]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site, built from nothing by the command of `make site`."""
    try:
        import myst_nb  # noqa: F401
    except ImportError:
        need(False, "Sphinx with myst-nb (make doors installs them)")
    folder = tmp_path_factory.mktemp("site")
    command = re.search(r"^site:.*\n\t\$\(BIN\)/python (-m sphinx .+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options = command.group(1).replace("build/site", str(folder)).split()
    done = subprocess.run([sys.executable, *options], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site) -> dict[Path, BeautifulSoup]:
    return {
        path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in sorted(site.rglob("*.html"))
    }


@pytest.fixture(scope="session")
def address(site):
    with served(site) as url:
        yield url


# --- as files -----------------------------------------------------------------------------------------------------


def test_has_every_lesson_and_every_page(site):
    wanted = {f"notebooks/{path.stem}" for path in NOTEBOOKS}
    wanted |= {f"docs/{name}" for name in PAGES}
    assert {f"{page}.html" for page in wanted} <= {str(path.relative_to(site)) for path in site.rglob("*.html")}


def test_the_reference_names_what_is_public(site):
    from nanlab import course

    text = (site / "docs" / "api.html").read_text(encoding="utf-8")
    public = [f"nanlab.{name}" for name in nanlab.__all__]
    public += [f"nanlab.trainers.{method}Trainer" for method in ("TPO", "TokenTPO", "DPO")]
    public += [f"nanlab.course.{name}" for name in course.__all__ if name.startswith("load")]
    assert [name for name in public if f'id="{name}"' not in text] == []


def broken_links(site: Path, pages: dict[Path, BeautifulSoup]) -> list[str]:
    """Links, pictures, scripts and styles inside the site that lead to no file, or to no such place in it."""
    places = {
        path: {tag[key] for key in ("id", "name") for tag in page.find_all(attrs={key: True})}
        for path, page in pages.items()
    }
    broken = []
    for path, page in pages.items():
        for link in [tag.get("href") or tag.get("src") for tag in page.find_all(["a", "link", "img", "script"])]:
            if not link or re.match(r"(https?:|mailto:|data:)", link):
                continue
            file, place = urldefrag(link)
            target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            if not target.is_file() or (place and unquote(place) not in places.get(target, {unquote(place)})):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def test_no_link_inside_is_broken(site, pages):
    assert broken_links(site, pages) == []


def test_a_broken_link_would_be_seen(site, pages):
    page = BeautifulSoup(
        '<a href="api.html#nowhere">x</a><a href="missing.html">y</a><a href="api.html">z</a>', "html.parser"
    )
    found = broken_links(site, {**pages, site / "docs" / "made_up.html": page})
    assert [line for line in found if "made_up" in line] == [
        "docs/made_up.html: api.html#nowhere",
        "docs/made_up.html: missing.html",
    ]


def test_links_between_lessons_and_from_the_claims_lead_to_pages(site, pages):
    hrefs = {a["href"] for page in pages.values() for a in page.find_all("a", href=True)}
    assert not [href for href in hrefs if ".ipynb" in href and not href.startswith("http")]
    claims = {a["href"] for a in pages[site / "docs" / "claims.html"].find_all("a", href=True)}
    assert "../notebooks/10_case_tpo_evaluate.html#reproduce" in claims


def test_loads_nothing_from_another_host(site, pages):
    for path, page in pages.items():
        loaded = [t.get("src", "") for t in page.find_all(["script", "img", "iframe", "source", "video", "audio"])]
        loaded += [t["href"] for t in page.find_all("link", href=True)]
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], path
    for style in site.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", style.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"""(url\(|@import)\s*["']?(https?:)?//""", text), style


def test_every_figure_has_its_text(site, pages):
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        told = [o["metadata"]["image/png"]["alt"] for o in outputs if "image/png" in o.get("data", {})]
        shown = pages[site / "notebooks" / f"{notebook.stem}.html"].find("article").find_all("img")
        assert [image.get("alt") for image in shown] == told
    assert not [image for page in pages.values() for image in page.find_all("img") if not image.get("alt")]


def test_solutions_are_folded(site, pages):
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        solutions = sum("solution" in cell["metadata"].get("tags", []) for cell in cells)
        folds = pages[site / "notebooks" / f"{notebook.stem}.html"].select("div.tag_solution details")
        assert len(folds) == solutions
        assert not [fold for fold in folds if fold.has_attr("open")]


def test_formulas_are_set_without_a_script(site, pages):
    page = pages[site / "notebooks" / "06_fp16_overflow.html"].find("article")
    assert len(page.find_all("math")) > 5
    for code in page.find_all(["pre", "code"]):
        code.decompose()
    assert "$" not in page.get_text()


# --- in the browser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_no_page_is_wider_than_the_screen(size, site, address):
    with open_page(*SIZES[size]) as page:
        for path in sorted(set(site.rglob("*.html")) - {site / "index.html"}):  # that one leads on at once
            name = path.relative_to(site).with_suffix("")
            page.goto(f"{address}/{name}.html")
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{name} is {wide} pixels too wide"
            if str(name) in LOOKED_AT:
                keep_screenshot(page, f"site_{size}_{name.name}")
        assert page.strangers == []


@pytest.mark.parametrize("size", SIZES)
def test_a_reader_finds_the_next_lesson(size, address):
    with open_page(*SIZES[size]) as page:
        page.goto(address)
        page.wait_for_url("**/docs/index.html")
        lesson = (
            page.locator(".sidebar-tree a", has_text="04 log of zero")
            .or_(page.locator(".sidebar-tree a[href*='04_log_of_zero']"))
            .first
        )
        if size == "phone":
            assert not lesson.evaluate("e => e.getBoundingClientRect().left >= 0"), "the menu lies over the page"
            page.locator("label[for=__navigation]:visible").first.click()
        lesson.click()
        page.wait_for_url("**/04_log_of_zero.html")
        page.locator("a.next-page").click()
        page.wait_for_url("**/05_unk_pad.html")


@pytest.mark.parametrize("size", SIZES)
def test_search_finds_a_word(size, address):
    with open_page(*SIZES[size]) as page:
        page.goto(f"{address}/docs/index.html")
        if size == "phone":
            page.locator("label[for=__navigation]:visible").first.click()
        page.locator("input.sidebar-search").fill("GradScaler")
        page.locator("input.sidebar-search").press("Enter")
        results = page.locator("ul.search li a")
        results.first.wait_for()
        assert any("06_fp16_overflow" in a.get_attribute("href") for a in results.all())
        keep_screenshot(page, f"site_{size}_search")
        results.first.click()
        page.wait_for_url(re.compile(r"GradScaler|highlight|notebooks|docs"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cards_and_text_are_readable(scheme, address):
    with open_page() as page:
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{address}/notebooks/08_locate.html")
        card = page.locator(".cell_output section", has_text="locate: ").first
        card.scroll_into_view_if_needed()
        keep_screenshot(page, f"site_card_{scheme}")
        assert worst_contrast(card)["ratio"] >= 4.5
        for output in page.locator(".cell_output").all():
            worst = worst_contrast(output)
            assert worst["ratio"] >= 4.5, worst


def test_a_solution_opens_with_a_click(address):
    with open_page() as page:
        page.goto(f"{address}/notebooks/08_locate.html")
        fold = page.locator(".tag_solution details").first
        assert not fold.locator("pre").first.is_visible()
        fold.locator("summary").click()
        assert fold.locator("pre").first.is_visible()


def test_the_cheat_sheet_prints_on_one_page(address, tmp_path):
    with open_page() as page:
        page.goto(f"{address}/docs/cheatsheet.html")
        page.pdf(path=tmp_path / "sheet.pdf", prefer_css_page_size=True)
        page.emulate_media(media="print")
        keep_screenshot(page, "site_cheatsheet_print")
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "sheet.pdf").read_bytes())) == 1
