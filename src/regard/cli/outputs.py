"""Where a command may write: looked at before any work, so that none of it is lost.

Why: a text is read for minutes, and a folder that is not there should be said in the first second.

How: `check_outputs` refuses a path in no folder or one that cannot be written to, a folder, a file
that was given to be read, two outputs in one file, and a file that is there and has not the ending
of what would replace it. `own_page` is where a page goes that nobody named: one file a user in the
temporary directory, which the next one replaces.

Left out: disks that are full.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

ENDINGS = {
    "--html": (".html", ".htm"),
    "--png": (".png", ".svg", ".pdf"),
    "--save": (".regard",),
    "--out": (".parquet", ".csv", ".json", ".regard"),
}


def check_outputs(outputs: Mapping[str, Path | None], inputs: Sequence[str | Path] = ()) -> None:
    """Refuse what could not be written at the end, or would destroy something; by option."""
    asked = {option: path for option, path in outputs.items() if path is not None}
    for option, path in asked.items():
        _check_path(option, path)
        for other, there in asked.items():
            if other != option and there.absolute() == path.absolute():
                raise ValueError(f"{other} and {option} are both {str(path)!r}; give two files")
        for read in inputs:
            if os.path.exists(read) and path.exists() and os.path.samefile(read, path):
                raise ValueError(f"{option} is {str(path)!r}, which is read; give another file")
    if "--png" in asked and find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'regard[view]'")


def _check_path(option: str, path: Path) -> None:
    folder, ending, known = path.parent, path.suffix.lower(), ENDINGS[option]
    if path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, a folder; name a file in it")
    if not folder.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, but there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"{option} is {str(path)!r}, where nothing may be written")
    if option in ("--png", "--out") and ending not in known:
        raise ValueError(
            f"{option} ends in {ending!r}; expected {', '.join(known[:-1])} or {known[-1]}"
        )
    if path.exists() and ending not in known:
        raise ValueError(
            f"{option} is {str(path)!r}, a file that is there and does not end in {known[0]}: it "
            "is not replaced; give another name"
        )


def own_page() -> Path:
    """The file for a page that nobody named; what was in it is replaced."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"regard-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or (user != "user" and found.st_uid != user):
        folder = Path(tempfile.mkdtemp(prefix="regard-"))  # a stranger's; pages are not for all
    return folder / "look.html"
