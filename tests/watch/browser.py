"""Drives a headless Chromium over its debugging pipe (the DevTools protocol, messages ended by a zero byte).

Needs nothing but the browser: no driver, no package.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0


def find_browser() -> str:
    """The browser's path; the test is skipped where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    return found


class Browser:
    """One page of a headless browser, as a context manager.

    Attributes:
        problems: what went to the console as an error, was thrown, or could not be loaded.
        requested: every address that the page asked for.
    """

    def __init__(self, profile: Path, width: int = 1280, height: int = 900, dark: bool = False):
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._size, self._dark = (width, height), dark
        self._number, self._rest = 0, b""
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Out of the way of 3 and 4, which the browser reads from and writes to.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (to_read, to_write)]
        os.close(to_read)
        os.close(to_write)

        place = (
            "import os, sys; a, b = map(int, sys.argv[1:3]); os.dup2(a, 3); os.dup2(b, 4);"
            "os.execv(sys.argv[3], sys.argv[3:])"
        )
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-extensions", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", place, *map(str, ends), find_browser(), *options],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._session: str | None = None

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        width, height = self._size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> Any:
        """Sends a command and waits for its answer."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        result: Any = None
        while result is None:
            # All of a block, as events may stand behind the answer.
            for answer in self._messages(until):
                if answer.get("id") != number:
                    self._event(answer)
                elif "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                else:
                    result = answer["result"]
        return result

    def _messages(self, until: float):
        if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError("the browser doesn't answer")
        block = os.read(self._read, 1 << 20)
        if not block:
            raise RuntimeError("the browser has ended")
        *whole, self._rest = (self._rest + block).split(b"\0")
        return [json.loads(message) for message in whole]

    def _event(self, message: dict[str, Any]) -> None:
        kind, told = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"])[:600])
        elif kind == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(told["args"])[:600])
        elif kind == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif kind == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])

    def open(self, url: str) -> None:
        """Goes to an address and waits until the page says that it is drawn."""
        # From an empty page: an address that differs in its fragment alone would load nothing.
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.call("Page.navigate", url=url)
        self.wait("document.body && document.body.dataset.ready !== undefined")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:600])
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Waits until an expression is true."""
        until = time.monotonic() + seconds
        while not self.js(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {condition}; problems: {self.problems}")
            time.sleep(0.05)

    def wait_for_request(self, *words: str, seconds: float = 30.0) -> None:
        """Waits until the page has asked for an address with these words in it."""
        until = time.monotonic() + seconds
        while not any(all(word in url for word in words) for url in self.requested):
            assert time.monotonic() < until, f"never asked for: {words}; {self.requested}"
            # Any call reads what the browser has told.
            self.js("0")
            time.sleep(0.05)

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drags the mouse over an element, from one share of its width to another."""
        script = (
            "(() => { const e = document.querySelector(%s); e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
        )
        left, top, width, height = self.js(script % json.dumps(selector))
        first, last = (left + width * share for share in (start, end))
        for kind, x in (("Moved", first), ("Pressed", first), ("Moved", last), ("Released", last)):
            place = {"x": x, "y": top + height / 2, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **place)

    def screenshot(self, file: Path) -> None:
        found = self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(found["data"]))
