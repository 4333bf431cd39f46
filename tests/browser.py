"""Loads pages in a headless browser."""

import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=20000"
)


def browse(page, profile, *options):
    """Return a page's document after its scripts ran, and the browser's log."""
    command = [CHROMIUM, *_OPTIONS.split(), f"--user-data-dir={profile}", *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr
