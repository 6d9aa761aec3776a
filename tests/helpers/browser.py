"""A real headless Chromium, driven over its DevTools pipe: open a page, ask it, press keys, take its picture.

Debian's package `chromium`; installed with apt-get where this runs as root and it is missing. No network is used.
"""
import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--remote-debugging-pipe"]
TIMEOUT_S = 300.0  # for what hangs: no machine is so slow


def find_chromium() -> str | None:
    """Its path; installs it if that is possible here. None where it cannot be had."""
    found = shutil.which("chromium")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        subprocess.run(["apt-get", "install", "-qqy", "chromium"], **quiet)
        found = shutil.which("chromium")
    return found


class Browser:
    """One Chromium with one page. Messages both ways are JSON that ends with a zero byte."""

    def __init__(self, chromium: str, profile: Path) -> None:
        to_read, self.to = os.pipe()
        self.back, from_write = os.pipe()
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash", chromium, *FLAGS,
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self.buffer, self.sent, self.events = b"", 0, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.to)  # Chromium ends when its pipe does
        os.close(self.back)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its result; what else arrives meanwhile is kept in `events`."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if session := getattr(self, "session", None):
            message["sessionId"] = session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(end - time.monotonic(), waiting_for=method)
            if answer.get("id") == self.sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, *, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Open a file and wait until its charts are drawn."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1,
                  mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme",
                                                           "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + TIMEOUT_S
        while not self.ask("document.documentElement?.dataset.ready !== undefined"):
            assert time.monotonic() < end, f"{path.name} did not get ready in {TIMEOUT_S:.0f} s"
            time.sleep(0.05)
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                      windowsVirtualKeyCode={"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}[name])

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, *, clip: dict[str, float] | None = None) -> None:
        """PNG of the whole page, or of a part of it in page coordinates."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = clip or {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip | {"scale": 1})
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors of scripts, of the content policy and of loading since the page was opened."""
        found = [json.dumps(event["params"]) for event in self.events
                 if event.get("method") == "Runtime.exceptionThrown"
                 or event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"]
        return found

    def requests(self) -> list[str]:
        """Every address the page asked for."""
        return [event["params"]["request"]["url"] for event in self.events
                if event.get("method") == "Network.requestWillBeSent"]

    def _receive(self, timeout_s: float, *, waiting_for: str) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"chromium did not answer {waiting_for}"
            piece = os.read(self.back, 1 << 20)
            assert piece, f"chromium ended during {waiting_for} with code {self.process.poll()}"
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)
