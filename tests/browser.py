"""Pages in a real browser: Chromium without a window, told what to do over its debugging pipe.

The DevTools protocol goes over two pipes, as JSON messages that end with a zero byte. So the standard library is all
that is needed: no package of 40 MB that brings a driver of its own, and no websocket with a port that listens.
`--dump-dom` and `--screenshot` would say neither what a page asked the network for nor where its words broke.
"""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OWN = ("file:", "data:", "blob:", "about:")  # schemes that need no network
SECONDS = 60  # until an answer is there, at most
LOOK = (Path(__file__).parent / "browser.js").read_text()


def installed():
    """The path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One that runs until it is closed, with one tab. `folder` takes its profile."""

    def __init__(self, folder):
        self._numbers, self._bytes, self.events, self._page = itertools.count(1), b"", [], None
        theirs, ours = os.pipe(), os.pipe()
        self._write, self._read = theirs[1], ours[0]
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], ours[1])]  # above 3 and 4, where they go
        flags = [
            "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--hide-scrollbars", "--disable-background-networking",
            "--disable-component-update", f"--user-data-dir={folder}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", installed(), *flags],
            pass_fds=ends,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
        )
        for end in (theirs[0], ours[1], *ends):
            os.close(end)
        self._tab = self._ask("Target.createTarget", url="about:blank")["targetId"]  # and its outermost frame
        self._session = self._ask("Target.attachToTarget", targetId=self._tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def ask(self, method, **values):
        """What the tab answers to a command of the protocol."""
        return self._ask(method, self._session, **values)

    def _ask(self, method, session=None, **values):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self, seconds=SECONDS):
        """The next message."""
        until = time.monotonic() + seconds
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser says nothing"
            found = os.read(self._read, 1 << 20)
            assert found, "the browser has ended"
            self._bytes += found
        text, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(text)

    def happened(self, method):
        """The parameters of all events of this kind since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def open(self, page, width, height):
        """Load a file into a window of this size; ends when all that it names is loaded."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.ask("Page.navigate", url=Path(page).resolve().as_uri())
        self.wait_for_another()

    def wait_for_another(self):
        """Wait until another page is loaded than the last one, as one is that loads itself again."""
        before = self._page
        while self._page == before:
            told = [each for each in self.happened("Page.lifecycleEvent") if each["frameId"] == self._tab]
            loaded = [each["loaderId"] for each in told if each["name"] == "load" and each["loaderId"] != before]
            if loaded:
                self._page = loaded[-1]
            else:
                self.events.append(self._next())

    def run(self, script):
        """The value of an expression in the page, awaited if it is a promise."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self):
        """What a reader would complain of, once all charts are drawn: lines of text (tests/browser.js)."""
        return self.run(f"({LOOK})()")

    @property
    def complaints(self):
        """Errors and warnings that the page wrote, and what it raised."""
        said = [
            event["entry"]["text"] + " " + event["entry"].get("url", "") for event in self.happened("Log.entryAdded")
        ]
        said += [
            f"{event['type']}: " + " ".join(str(each.get("value", each.get("description"))) for each in event["args"])
            for event in self.happened("Runtime.consoleAPICalled")
        ]
        raised = [event["exceptionDetails"] for event in self.happened("Runtime.exceptionThrown")]
        return said + [each.get("exception", each).get("description", each["text"]) for each in raised]

    @property
    def from_elsewhere(self):
        """The addresses that the page asked for and that are neither files nor in the page itself."""
        asked = [event["request"]["url"] for event in self.happened("Network.requestWillBeSent")]
        return [url for url in asked if not url.startswith(OWN)]

    def picture(self, path, *, whole=False):
        """Save what is seen, or the whole page, as PNG."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        """End it."""
        with contextlib.suppress(AssertionError, OSError):
            self._ask("Browser.close")
        os.close(self._write)
        os.close(self._read)
        self._process.wait()
