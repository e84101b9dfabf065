"""A real Chromium, headless, with a profile of its own: it trusts one certificate, and notes what it asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PICTURES = Path(__file__).parents[1] / "build" / "screenshots"  # kept: to be looked at
REMEDY = "the browser tests need Chromium and its driver: apt-get install chromium chromium-driver"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    "--hide-scrollbars",  # a picture of a whole page has none
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
)


COUNT_PIXELS = """
const [place, name] = arguments, canvas = document.querySelector(place);
if (!canvas) return 0;
const read = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height + 1 });
const context = read.getContext("2d", { willReadFrequently: true });
context.drawImage(canvas, 0, 1);
context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name);
context.fillRect(0, 0, read.width, 1);
const seen = context.getImageData(0, 0, read.width, read.height).data;
let found = -read.width;
for (let i = 0; i < seen.length; i += 4) {
  if (seen[i + 3] > 150 && [0, 1, 2].every((k) => Math.abs(seen[i + k] - seen[k]) < 12)) found += 1;
}
return found;
"""


@contextmanager
def open_browser(profile: Path, certificate: bytes) -> Iterator[Browser]:
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.fail(REMEDY)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    trusted = f"--ignore-certificate-errors-spki-list={_key_hash(certificate)}"
    for flag in (*FLAGS, trusted, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(made)
    finally:
        made.quit()


class Browser:
    """What the tests do with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.console: list[str] = []
        self.asked: set[str] = set()  # scheme://host:port of everything that it loaded

    def text(self, selector: str) -> str:
        """As a reader sees it; "" = it is not there."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def emulate(self, *, dark: bool = False, phone: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        if phone:
            metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        else:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def take_picture(self, name: str, folder: Path = PICTURES, *, until: str = "html") -> Path:
        """Of the page, down to the end of the first element that `until` selects."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        end = "document.querySelector(arguments[0]).getBoundingClientRect().bottom + scrollY"
        size = self.run(
            f"return [document.documentElement.clientWidth, {end} + (arguments[0] === 'html' ? 0 : 12)]", until
        )
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        order = {"captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", order)["data"]))
        return path

    def pixels(self, canvas: str, colour: str) -> int:
        """How many of a canvas have the colour that the page's style calls by this name, or nearly."""
        return int(self.run(COUNT_PIXELS, canvas, colour))

    def read_logs(self) -> None:
        """The driver hands each line over once."""
        self.console += [entry["message"] for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = urlsplit(message["params"]["request"]["url"])
                if url.scheme not in ("data", "chrome", "about"):
                    self.asked.add(f"{url.scheme}://{url.netloc}")


def _key_hash(certificate: bytes) -> str:
    key = x509.load_pem_x509_certificate(certificate).public_key()
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    return base64.b64encode(digest).decode()
