"""A real browser without a window, and without a network, that renders a page."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# Debian's package chromium-headless-shell has the first of these, chromium the second.
_PROGRAMS = ("chromium-headless-shell", "chromium")
_TIMEOUT_S = 120.0


def program() -> str:
    """Raises FileNotFoundError if there is no browser; scripts/test installs one."""
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(f"none of {', '.join(_PROGRAMS)} is installed")


def rendered(page: Path, work: Path, *, width: int, height: int) -> tuple[str, Path]:
    """The elements of a local page as the browser has understood them, and a picture of it. Each
    request of the page to a network would fail."""
    picture = work / "picture.png"
    common = [
        program(),
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--proxy-server=127.0.0.1:9",
        f"--user-data-dir={work / 'profile'}",
        f"--window-size={width},{height}",
    ]
    # Without a home of the user, and without a bus.
    environment = {"PATH": os.environ["PATH"], "HOME": str(work), "LANG": "C.UTF-8"}
    texts = []
    for option in ("--dump-dom", f"--screenshot={picture}"):
        done = subprocess.run(
            [*common, option, page.as_uri()],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        texts.append(done.stdout)
    return texts[0], picture
