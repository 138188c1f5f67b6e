"""The example notebooks: run one in a kernel of its own, and what of its outputs is stored.

    python tests/example_notebooks.py

runs them all and stores what they gave: text and pictures, so that a page of the repository shows
something; no widgets, whose state is large and means nothing without a kernel.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"
STORED = ("image/png", "text/plain")


def read_notebook(path: Path) -> Any:
    import nbformat

    return nbformat.read(path, as_version=4)


def run_notebook(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a run in `folder`; a cell that fails raises."""
    import nbclient

    notebook = read_notebook(path)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    kernel = {
        **os.environ,
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT / "src"),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
    }
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=120,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,  # a kernel may send one print as two messages
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=kernel)
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def lighten(notebook: Any) -> Any:
    """What is stored of a notebook that was run."""
    light = copy.deepcopy(notebook)
    for cell in code_cells(light):
        cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        for out in cell.outputs:
            if "data" in out:
                out.data = {kind: out.data[kind] for kind in STORED if kind in out.data}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    light.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return light


def main() -> None:
    import nbformat

    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(lighten(run_notebook(path, Path(folder))), path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
