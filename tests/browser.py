"""The door tests' browser: Debian's Chromium, driven by Playwright, closed to everything but this machine."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCREENSHOTS = ROOT / "build" / "screenshots"
FLAGS = [  # root needs no-sandbox; the others keep the browser from looking for hosts of its maker
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
LOCAL = ("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "about:")


def need(there: bool, what: str) -> None:
    """Skip a door test by the name of what is missing; with NANLAB_ALL_DOORS=1, as in .ci/run, fail instead."""
    if not there:
        (pytest.fail if os.environ.get("NANLAB_ALL_DOORS") == "1" else pytest.skip)(f"needs {what}")


def need_browser() -> str:
    """The path of Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    need(path is not None, "Chromium (Debian: apt-get install chromium)")
    need(importlib.util.find_spec("playwright") is not None, "Playwright (make doors installs it)")
    return path


@contextmanager
def open_page(width: int = 1280, height: int = 800) -> Iterator:
    """A page of a fresh browser. `page.strangers` are the addresses outside this machine that it asked for."""
    path = need_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(60_000)
            page.strangers = []
            page.on("request", lambda r: None if r.url.startswith(LOCAL) else page.strangers.append(r.url))
            yield page
        except BaseException:
            keep_screenshot(page, "failed")
            raise
        finally:
            browser.close()


def keep_screenshot(page, name: str, **kwargs) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", **kwargs)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server over `folder`, on a free port of the loopback address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


# The lowest contrast of text against its background below one element (WCAG 2.2, 1.4.3), with the text itself. Text in
# pictures and hidden text do not count; a transparent background is the one below it.
CONTRAST = """root => {
  const rgba = text => { const n = text.match(/[\\d.]+/g).map(Number);
    const c = text.startsWith('color(') ? n.slice(0, 3).map(x => x * 255) : n.slice(0, 3);
    return [...c, n.length > 3 ? n[3] : 1]; };
  const over = (top, under) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * under[i]).concat(1);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { const layers = [];
    for (; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]); };
  let worst = {ratio: 99, text: ''};
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.textContent.trim(), e = walk.currentNode.parentElement;
    if (!text || !e.checkVisibility() || ['STYLE', 'SCRIPT'].includes(e.tagName)) continue;
    const back = ground(e), front = over(rgba(getComputedStyle(e).color), back);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < worst.ratio) worst = {ratio, text: text.slice(0, 80)};
  }
  return worst;
}"""


def worst_contrast(locator) -> dict:
    """`{"ratio": …, "text": …}` of the least readable text in an element that is there."""
    return locator.evaluate(CONTRAST)
