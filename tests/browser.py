"""A headless Chromium for tests, driven over its debugging pipe: no driver, no further package.

Everything that the browser complains about (errors of the page, of the console, refused content)
is kept in `complaints`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
DESKTOP = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
BROKEN = ("error", "warning", "assert")


class Browser:
    """One page of a browser."""

    def __init__(self, read: int, write: int) -> None:
        self.complaints: list[str] = []
        self._read, self._write = read, write
        self._buffer = b""
        self._count = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for part in ("Page", "Runtime", "Log"):
            self.call(f"{part}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol and its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self._next(deadline)
            if found.get("id") == self._count:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._hear(found)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = deadline - time.monotonic()
            assert left_s > 0 and select.select([self._read], [], [], left_s)[0], "no answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _hear(self, event: Mapping[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:2000])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in BROKEN:
            self.complaints.append(json.dumps(params["args"])[:2000])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(json.dumps(params["entry"])[:2000])

    def look_like(self, device: Mapping[str, Any], *, dark: bool = False) -> None:
        """A screen of this size, with fingers if it is a phone's."""
        self.call("Emulation.setDeviceMetricsOverride", **device)
        self.call("Emulation.setTouchEmulationEnabled", enabled=device["mobile"])
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str, until: str) -> None:
        self.run("window.left = true")  # else the page before could answer for this one
        self.call("Page.navigate", url=url)
        self.wait(f"!window.left && {until}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = PATIENCE_S) -> None:
        """Until an expression is true, or an element is there."""
        deadline = time.monotonic() + timeout_s
        while not self.run(f"(() => {{ try {{ return Boolean({script}) }} catch {{ }} }})()"):
            assert time.monotonic() < deadline, f"never true: {script}; {self.complaints}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """The left button held down on the way."""
        for kind, (x, y) in (
            ("mouseMoved", start),
            ("mousePressed", start),
            ("mouseMoved", ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            held = {"button": "left", "clickCount": 1, "buttons": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def tap(self, point: tuple[float, float]) -> None:
        touch = {"x": point[0], "y": point[1]}
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[touch])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter")

    def picture(self, file: Path, *, whole: bool = True) -> None:
        file.parent.mkdir(exist_ok=True)
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    assert CHROMIUM is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # the browser reads commands from 3 and writes to 4
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_in, ours_out)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.terminate()
        process.wait()
