"""Run a notebook without a browser, with its text output as it comes; keep an HTML copy and the figures.

`python -m nanlab.course.headless notebooks/13_full_run.ipynb runs`
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

from nanlab.errors import InputError


class _Talking(NotebookClient):
    """Prints headings and text output while the notebook runs."""

    def output(self, outs, msg, display_id, cell_index):
        content = msg["content"]
        if msg["msg_type"] == "stream" and content.get("name") == "stdout":
            print(content["text"], end="", flush=True)
        return super().output(outs, msg, display_id, cell_index)

    async def async_execute_cell(self, cell, cell_index, **kwargs):
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            print(f"\n{cell.source.splitlines()[0]}", flush=True)
        return await super().async_execute_cell(cell, cell_index, **kwargs)


def run_notebook(path: Path, folder: Path) -> Path:
    """Execute `path` in its own folder; write `folder/<name>.html` and its figures. Returns the HTML file.

    Raises:
        InputError: no such notebook, or a cell failed (named, with the error).
    """
    if not path.is_file():
        raise InputError(f"{path}: no such notebook")
    notebook = nbformat.read(path, as_version=4)
    folder.mkdir(parents=True, exist_ok=True)
    client = _Talking(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    try:
        client.execute()
    except CellExecutionError as error:
        raise InputError(f"{path}: a cell failed: {error.ename}: {error.evalue}") from error
    page = folder / f"{path.stem}.html"
    page.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    for number, png in enumerate(_figures(notebook), start=1):
        (folder / f"{path.stem}_{number}.png").write_bytes(base64.b64decode(png))
    return page


def _figures(notebook) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def main(notebook: str, folder: str) -> int:
    try:
        page = run_notebook(Path(notebook), Path(folder))
    except InputError as error:
        print(f"nanlab: {error}", file=sys.stderr)
        return 2
    print(f"\nHTML copy: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
