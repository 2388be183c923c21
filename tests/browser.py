"""Headless Chromium for the tests of the UI: where it is, how it starts, where its screenshots go."""

import shutil

from dagster_server import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = ROOT / "test-artifacts"
VIEW = {"width": 1600, "height": 1000}
VIEW_MILLISECONDS = 60_000
"""How long a page may take to show something, on a busy machine."""
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
