"""A headless Chromium that a test drives through a pipe: a page is opened, and watched until it looks as it should."""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

# WebGL 2 without a graphics card: ANGLE draws by SwiftShader, which newer Chromiums want to be asked for by name.
FLAGS = [
    "--headless", "--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist", "--no-first-run", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-default-browser-check", "--disable-dev-shm-usage",
]  # fmt: skip


def find_browser() -> str:
    """Return the path of a Chromium that starts; a test that has none is left out."""
    paths = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    found = next((path for path in paths if path and starts(path)), None)
    if found is None:
        pytest.skip("no Chromium is here, to open the page with")
    return found


@cache
def starts(path: str) -> bool:
    """Tell whether a program is there, and no script that merely says how it is installed, as some systems have."""
    return subprocess.run([path, "--version"], capture_output=True).returncode == 0


class Refused(Exception):
    """What the browser says of something that it does not do, such as drawing a page that is just being left."""


class Browser:
    """One page."""

    def __init__(self, folder: Path, size: tuple[int, int]):
        program = find_browser()
        mine, theirs = os.pipe(), os.pipe()  # the browser reads from the first, and writes to the second

        def place() -> None:  # it wants them as 3 and 4
            a, b = os.dup(mine[0]), os.dup(theirs[1])
            os.dup2(a, 3)
            os.dup2(b, 4)

        command = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(mine[0])
        os.close(theirs[1])
        self.out, self.into = mine[1], theirs[0]
        self.number, self.rest = 0, b""
        self.messages: list[dict[str, Any]] = []
        try:
            self._begin(size)
        except BaseException:
            self.close()
            raise

    def _begin(self, size: tuple[int, int]) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each for each in targets if each["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for name in ("Page.enable", "Network.enable", "Runtime.enable", "Log.enable"):
            self.call(name)
        wide, high = size
        self.call("Emulation.setDeviceMetricsOverride", width=wide, height=high, deviceScaleFactor=1, mobile=False)

    session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something, and return its answer."""
        self.number += 1
        asked: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            asked["sessionId"] = self.session
        os.write(self.out, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise Refused(answer["error"]["message"])
                result: dict[str, Any] = answer["result"]
                return result
            self.messages.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], 60)
            assert ready, "the browser does not answer"
            got = os.read(self.into, 1 << 20)
            assert got, "the browser has ended"
            self.rest += got
        first, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Return the value of a line of JavaScript."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def draw(self) -> np.ndarray:
        """Return what the page looks like, [H, W, 3]."""
        content = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))

    def watch(self, enough: Callable[[np.ndarray], bool], *, seconds: float = 90) -> np.ndarray:
        """Draw the page again and again until it looks as it should, and return it as it looks last."""
        end = time.monotonic() + seconds
        while True:
            try:
                picture = self.draw()
                if enough(picture) or time.monotonic() > end:
                    return picture
            except Refused:
                if time.monotonic() > end:
                    raise
            time.sleep(0.5)

    def asked(self) -> list[str]:
        """List the addresses that the page asked for."""
        found = [
            each["params"]["request"]["url"]
            for each in self.messages
            if each.get("method") == "Network.requestWillBeSent"
        ]
        return [address for address in found if not address.startswith(("data:", "blob:"))]

    def complaints(self) -> list[str]:
        """List errors of the page."""
        told = []
        for each in self.messages:
            if each.get("method") == "Runtime.exceptionThrown":
                told.append(json.dumps(each["params"]["exceptionDetails"])[:600])
            if each.get("method") == "Log.entryAdded" and each["params"]["entry"]["level"] == "error":
                told.append(str(each["params"]["entry"]["text"])[:600])
        return told

    def close(self) -> None:
        os.close(self.out)
        os.close(self.into)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
