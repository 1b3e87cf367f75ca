"""A headless Chromium, driven through its DevTools pipe with the standard library only."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BINARY = next((path for name in NAMES if (path := shutil.which(name))), None)
SKIP = "no Chromium on the path; install the package chromium to test the page in a browser"
LIMIT_S = 60.0


class Browser:
    """One tab. Every wait is bounded."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = cast("str", found["sessionId"])
        self.size(1440, 900)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError("Chromium gave no answer in time")
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise ConnectionError("Chromium ended")
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        return cast("dict[str, Any]", json.loads(text))

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return cast("dict[str, Any]", answer["result"])

    def close(self) -> None:
        """Ask Chromium to end itself and what it started."""
        message = {"id": 0, "method": "Browser.close"}
        os.write(self._commands, json.dumps(message).encode() + b"\0")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def eval(self, code: str) -> Any:  # noqa: ANN401 - what JSON can be
        """Evaluate an expression in the page; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, code: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + LIMIT_S
        while not self.eval(code):
            if time.monotonic() > until:
                raise TimeoutError(f"never true in the page: {code}")
            time.sleep(0.02)

    def open(self, path: Path) -> None:
        """Load a file and wait until the page says that it is drawn, or what is wrong with it."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.until(
            "location.protocol === 'file:' && document.documentElement !== null"
            " && /drawn|problem/.test(Object.keys(document.documentElement.dataset))"
        )

    def drawn_ms(self) -> float:
        """Milliseconds from the start of navigation to the first picture."""
        return float(self.eval("document.documentElement.dataset.drawn"))

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        frame = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.eval(f"new Promise((done) => {frame})")

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=1, clickCount=1)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self) -> bytes:
        """A PNG of the tab."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def open_browser(profile: Path) -> Generator[Browser, None, None]:
    """Start Chromium with a profile of its own, and end it whatever happens."""
    assert BINARY is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Chromium reads commands from 3 and answers on 4; these must not be either before they are.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]

    def hand_over() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [
            BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-dev-shm-usage",
            "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
        ],
        preexec_fn=hand_over,
        close_fds=False,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for fd in (theirs_in, theirs_out, *high):
        os.close(fd)
    browser: Browser | None = None
    try:
        browser = Browser(ours_out, ours_in)
        yield browser
    finally:
        try:
            if browser is not None:
                browser.close()
            process.wait(timeout=10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            os.killpg(process.pid, 9)
            process.wait()
        os.close(ours_out)
        os.close(ours_in)
