"""A headless Chromium through chromedriver, spoken to with plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)


class Browser:
    """One session of a browser."""

    def __init__(self, url: str, profile: Path) -> None:
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self.url = url
        self.session = _call("POST", f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def command(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """A command of WebDriver; what it answers."""
        return _call(method, f"{self.url}/session/{self.session}/{path}", body)

    def devtools(self, name: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.command("POST", "goog/cdp/execute", {"cmd": name, "params": params})

    def look(self, width: int, *, dark: bool, height: int = 900) -> None:
        """The size of the window, and what the user prefers."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Loads a file, to its end: the command alone was seen to return before a page was whole."""
        self.command("POST", "url", {"url": path.resolve().as_uri()})
        until = time.monotonic() + 30
        while self.run("return [location.href, document.readyState]") != [path.resolve().as_uri(), "complete"]:
            if time.monotonic() > until:
                raise RuntimeError(f"{path} did not load")
            time.sleep(0.02)

    def run(self, script: str, *args: Any) -> Any:
        """What a script's ``return`` gives."""
        return self.command("POST", "execute/sync", {"script": script, "args": list(args)})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Lines of the ``browser`` (console) or ``performance`` log since the last call."""
        return self.command("POST", "se/log", {"type": kind})

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in ``folder``; gone at the end.

    Raises:
        RuntimeError: where it does not start in 30 s.
    """
    assert DRIVER is not None
    log = folder / "chromedriver.log"
    driver = subprocess.Popen([DRIVER, "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, text=True)
    try:
        session = Browser(f"http://127.0.0.1:{_port(driver)}", folder / "profile")
        try:
            yield session
        finally:
            _call("DELETE", f"{session.url}/session/{session.session}")
    finally:
        driver.terminate()
        try:
            driver.wait(20)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
        if driver.stdout:
            driver.stdout.close()


def _port(driver: subprocess.Popen[str]) -> int:
    """chromedriver takes a free port and says which."""
    assert driver.stdout is not None
    until = time.monotonic() + 30
    while time.monotonic() < until:
        line = driver.stdout.readline()
        if "started successfully on port" in line:
            return int(line.strip().rstrip(".").rsplit(" ", 1)[1])
        if not line:
            break
    raise RuntimeError("chromedriver did not start")


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body or {}).encode() if method == "POST" else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _LOCAL.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{method} {url}: {error.read().decode(errors='replace')[:500]}") from error
