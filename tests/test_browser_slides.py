"""The slides of a lesson (make slides), opened from the disk as in a room without a network."""

from __future__ import annotations

import shutil

import pytest
from browser import ROOT, keep_screenshot, need, need_browser, open_page

pytestmark = [pytest.mark.doors, pytest.mark.timeout(420)]
LESSON = ROOT / "notebooks" / "06_fp16_overflow.ipynb"  # it has formulas and figures


@pytest.fixture(scope="module")
def deck(tmp_path_factory):
    need_browser()
    from tools import slides

    need((ROOT / "build" / f"reveal.js-{slides.REVEAL}.tgz").is_file() or shutil.which("npm") is not None, "npm")
    folder = tmp_path_factory.mktemp("slides")
    (ROOT / "build").mkdir(exist_ok=True)
    slides.put_reveal(folder, cache=ROOT / "build")
    return slides.write_slides(LESSON, folder)


def test_a_deck_opens_and_moves_on_with_the_keys(deck):
    with open_page() as page:
        page.goto(deck.as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        title = page.locator(".reveal .slides section.present h1")
        assert "fp16" in title.inner_text()
        keep_screenshot(page, "slides_first")
        seen = [page.evaluate("JSON.stringify(Reveal.getIndices())")]
        for _ in range(3):
            page.keyboard.press("Space")
            seen.append(page.evaluate("JSON.stringify(Reveal.getIndices())"))
        page.keyboard.press("ArrowRight")
        seen.append(page.evaluate("JSON.stringify(Reveal.getIndices())"))
        assert len(set(seen)) == len(seen), seen
        assert not title.is_visible()
        page.wait_for_timeout(1000)  # the slide has come to rest
        keep_screenshot(page, "slides_later")
        assert [url for url in page.strangers if not url.startswith("file:")] == []


def test_figures_are_drawn_and_told(deck):
    with open_page() as page:
        page.goto(deck.as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        figures = page.locator(".reveal .slides img").evaluate_all(
            "images => Promise.all(images.map(async i => (await i.decode(), [i.naturalWidth, i.alt])))"
        )
        assert len(figures) == 3
        assert all(width > 100 and len(alt) > 20 for width, alt in figures), figures


def test_what_does_not_fit_on_a_slide_can_be_scrolled_to(deck):
    with open_page() as page:
        page.goto(deck.as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        total = page.evaluate("Reveal.getTotalSlides()")
        for number in range(total):
            height, overflow = page.evaluate(
                "(s => [s.clientHeight, getComputedStyle(s).overflowY])(Reveal.getCurrentSlide())"
            )
            assert (height <= 800, overflow) == (True, "auto"), f"slide {number}"
            page.evaluate("Reveal.next()")
        assert page.evaluate("Reveal.isLastSlide()"), f"{total} steps do not reach the end"
