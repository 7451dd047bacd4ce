"""A real browser for tests: Chromium without a window, spoken to over a pipe.

The protocol is Chromium's own (DevTools): JSON messages that end with a zero byte, on the browser's
file descriptors 3 and 4. So nothing has to be installed but the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_BECOME = (
    "import os, sys; a, b = map(int, sys.argv[1:3]); a, b = os.dup(a), os.dup(b);"
    "os.dup2(a, 3); os.dup2(b, 4); os.set_inheritable(3, True); os.set_inheritable(4, True);"
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
_PATIENCE = 120.0  # seconds without an answer before the browser is given up


class Page:
    """One page; what it logged and what it asked the network for is kept.

    Attributes:
        problems: errors of scripts, and messages at the level of an error or a warning.
        requests: addresses that were asked for, other than the page's own file and ``data:``.
        downloads: the folder that downloads go to.
    """

    def __init__(self, into: int, out_of: int, downloads: Path) -> None:
        self._into, self._out_of = into, out_of
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.downloads = downloads
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))

    def send(self, method: str, **params: Any) -> Any:
        """Ask, and wait for the answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def text(self, selector: str) -> str:
        """What an element says."""
        found: str = self.run(f"document.querySelector({json.dumps(selector)}).textContent.trim()")
        return found

    def texts(self, selector: str) -> list[str]:
        """What all such elements say."""
        script = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        found: list[str] = self.run(script)
        return found

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go to a file and wait until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        # or the page would still be scrolling when the next click is aimed
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[theme, still])
        self._own = path.as_uri()
        self.send("Page.navigate", url=self._own)
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + _PATIENCE
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def settle(self) -> None:
        """Until the page has drawn what it was told to."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str) -> None:
        """A key, as from a keyboard, to what has the focus."""
        about: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": _CODES.get(key, 0)}
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """The left button of a mouse, on the middle of an element."""
        x, y = self.run(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{ block: "center", behavior: "instant" }});
                const box = element.getBoundingClientRect();
                return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """A value for a field, with the events that a user's choice has."""
        self.run(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.value = {json.dumps(value)};
                for (const name of ["input", "change"])
                    element.dispatchEvent(new Event(name, {{ bubbles: true }}));
            }})()"""
        )
        self.settle()

    def downloaded(self, name: str) -> bytes:
        """The content of a file, once it is there whole."""
        end = time.monotonic() + _PATIENCE
        path = self.downloads / name
        while not path.exists() or list(self.downloads.glob("*.crdownload")):
            if time.monotonic() > end:
                raise TimeoutError(name)
            time.sleep(0.02)
        return path.read_bytes()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What it looks like, as a PNG."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            if not select.select([self._out_of], [], [], _PATIENCE)[0]:
                raise TimeoutError("the browser does not answer")
            some = os.read(self._out_of, 1 << 20)
            if not some:
                raise RuntimeError("the browser ended")
            self._buffer += some
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._notice(message.get("method"), message.get("params"))
        return message

    def _notice(self, method: str | None, about: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.problems.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {about['message']}")
        elif method == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if url.partition("#")[0] != self._own and not url.startswith(("data:", "blob:")):
                self.requests.append(url)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page in a browser of its own, whose profile and downloads are in ``folder``."""
    assert EXECUTABLE is not None
    (folder / "downloads").mkdir(parents=True)
    to_browser, into = os.pipe()
    out_of, from_browser = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _BECOME, str(to_browser), str(from_browser), EXECUTABLE),
            *(*_FLAGS, f"--user-data-dir={folder / 'profile'}"),
        ],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(into, out_of, folder / "downloads")
    finally:
        os.close(into)  # at the end of its pipe the browser ends
        os.close(out_of)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
