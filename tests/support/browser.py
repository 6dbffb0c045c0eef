"""A real Chromium, driven with mouse and keys over WebDriver. Needs Debian's chromium and chromium-driver."""

from __future__ import annotations

import json
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One tab. `run` returns what a script returns, `drag` and `point` move the mouse."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        wanted = {
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"],
                "prefs": {"download.default_directory": str(folder), "download.prompt_for_download": False},
            },
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/session/{made['sessionId']}"

    def _ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._address + path, data, {"Content-Type": "application/json"}, method=verb)  # noqa: S310
        with urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)["value"]

    def open(self, path: Path, width: int = 1200, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})
        self._ask("POST", "/url", {"url": path.as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def drag(self, selector: str, start: float, end: float) -> None:
        """Press the mouse at a part of an element's width, move it to another, and let go."""
        box = self._box(selector)
        self._mouse([self._to(box, start), {"type": "pointerDown", "button": 0}, self._to(box, (start + end) / 2),
                     self._to(box, end), {"type": "pointerUp", "button": 0}])  # fmt: skip

    def point(self, selector: str, where: float = 0.5) -> None:
        self._mouse([self._to(self._box(selector), where)])

    def click(self, selector: str) -> None:
        press = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._mouse([self._to(self._box(selector), 0.5), *press])

    def keys(self, selector: str, text: str) -> None:
        element = self._ask("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def _box(self, selector: str) -> dict[str, float]:
        script = (
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return {x: b.x, y: b.y, width: b.width, height: b.height}"
        )
        found: dict[str, float] = self.run(script, selector)
        return found

    def _to(self, box: dict[str, float], part: float) -> dict[str, Any]:
        x, y = box["x"] + part * box["width"], box["y"] + box["height"] / 2
        return {"type": "pointerMove", "duration": 50, "x": round(x), "y": round(y)}

    def _mouse(self, actions: list[dict[str, Any]]) -> None:
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def complaints(self) -> list[str]:
        """What the console has said: errors of scripts, violations of the policy."""
        return [row["message"] for row in self._ask("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        options = {"format": "png", "captureBeyondViewport": True}
        found = self._ask("POST", "/goog/cdp/execute", {"cmd": "Page.captureScreenshot", "params": options})
        path.write_bytes(b64decode(found["data"]))

    def close(self) -> None:
        self._ask("DELETE", "")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium; what it downloads is in the folder."""
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:  # noqa: S603
        try:
            assert driver.stdout is not None
            port = next(line.split()[-1].rstrip(".") for line in driver.stdout if "started successfully" in line)
            tab = Browser(f"http://127.0.0.1:{port}", folder)
            try:
                yield tab
            finally:
                tab.close()
        finally:
            driver.terminate()
