"""The page in a browser: every plot is drawn, every switch works, nothing errors."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.cli.report.scripted import Scripted, a_run, read
from tfpreempt.cli.report.page import make_page

pytestmark = pytest.mark.slow  # imports matplotlib

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def page_of(run: Scripted, directory: Path, place: str = "/runs/<digits>") -> str:
    run.write(directory)
    return make_page(read(directory), place)


def test_the_page_has_no_script_and_asks_for_nothing(tmp_path: Path) -> None:
    page = page_of(a_run(), tmp_path)
    assert "<script" not in page
    assert not [each for each in ("src=", "@import", "url(http") if each in page]
    assert "<b>$" not in page
    assert "/runs/&lt;digits&gt;" in page


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("loss #0000ff", "loss #0000ff"),
        ("loss #000001", "loss #000001"),
        ("\ud800", "\\ud800"),
        ("a\0b\nc\x1b[2J", "a\\x00b\\nc\\x1b[2J"),
        ('id="a" url(#b)', 'id="a" url(#b)'),
        ("</svg><script>", "&lt;/svg&gt;&lt;script&gt;"),
        ("<!--", "&lt;!--"),
        (r"$\frac{1}{$ \\", r"$\frac{1}{$ \\"),
    ],
)
def test_a_metric_may_have_any_name(tmp_path: Path, name: str, shown: str) -> None:
    run = Scripted(workers=1)
    run.start()
    run.log(**{name: 1.0})
    run.train(3)
    run.log(**{name: 0.5})
    page = page_of(run, tmp_path)
    assert "<script" not in page
    page.encode()
    assert re.findall(r"<text [^>]*>([^<]*)</text>", page).count(shown) == 2


def test_text_of_the_page_cannot_control_a_terminal(tmp_path: Path) -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(3)
    run.save(0.5, because="a\x1b[2Jb\u202ec<b>")
    page = page_of(run, tmp_path)
    assert r"a\x1b[2Jb\u202ec&lt;b&gt;" in page
    assert "\x1b" not in page


def test_a_run_of_nothing_has_a_page(tmp_path: Path) -> None:
    run = Scripted(workers=1)
    run.start()
    assert "running at step 1" in page_of(run, tmp_path)


@pytest.mark.parametrize(
    "times",
    [
        {"monotonic": 1e15},
        {"monotonic": -1e13},
        {"wall": 1e15, "monotonic": 0.0},
        {"wall": 1e11, "monotonic": 1e10},
        {"process_seconds": 1e15},
        {"seconds": 1e10, "process_seconds": None, "incarnation": "another"},
    ],
    ids=str,
)
def test_times_that_no_calendar_has_break_no_page(
    tmp_path: Path, times: dict[str, Any]
) -> None:
    a_run().write(tmp_path)
    path = tmp_path / "worker-0.jsonl"
    lines = path.read_text("utf-8").splitlines()
    restored = next(
        each for each in map(json.loads, lines) if each["event"] == "restored"
    )
    path.write_text("\n".join([json.dumps(restored | times), *lines]), "utf-8")
    assert "at step 286" in make_page(read(tmp_path), "/runs")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    """Returns Debian's Chromium, which needs no network."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.add_argument("--disable-dev-shm-usage")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def shown(browser: webdriver.Chrome, selector: str) -> list[bool]:
    """Which elements can be seen, and have an area."""
    script = """
        return [...document.querySelectorAll(arguments[0])].map(each => {
            const box = each.getBoundingClientRect();
            return each.checkVisibility() && box.width > 0 && box.height > 0;
        });
    """
    return list(browser.execute_script(script, selector))


def fill(browser: webdriver.Chrome, selector: str) -> str:
    script = "return getComputedStyle(document.querySelector(arguments[0])).fill"
    return str(browser.execute_script(script, selector))


@pytest.mark.slow
def test_the_page_works_in_a_browser(browser: webdriver.Chrome, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of(a_run(), tmp_path / "journal"), encoding="utf-8")
    browser.set_window_size(1280, 1000)
    browser.get(path.as_uri())

    def click(selector: str) -> None:
        element = browser.find_element(By.CSS_SELECTOR, selector)
        browser.execute_script("arguments[0].scrollIntoView()", element)
        element.click()

    for section in ("goodput", "timeline", "durations"):
        assert shown(browser, f"#{section} svg") == [True], section
    assert shown(browser, "#warnings li") == [True]
    # Each worker has bars in the colour of the phase, with a description.
    bars = browser.find_elements(By.CSS_SELECTOR, "#timeline g[id*='span-'] title")
    told = [each.get_attribute("textContent") for each in bars]
    assert "worker 2, lost: 25 s" in told
    assert all(shown(browser, "#timeline g[id*='span-']"))

    # Curves over time, then over steps.
    assert shown(browser, "#metrics svg") == [True, False] * 2
    click("label:has(#by-step)")
    assert shown(browser, "#metrics svg") == [False, True] * 2

    # The newest interruption is open; the other opens by a click.
    assert shown(browser, "#interruptions details > div") == [False, True]
    click("#interruptions details:nth-of-type(1) summary")
    assert shown(browser, "#interruptions details > div") == [True, True]
    click("#commits summary")
    assert all(shown(browser, "#commits tbody tr"))

    # Light and dark: the page and the plots.
    colours = set()
    for theme in ("light", "dark"):
        click(f"label:has(#{theme})")
        body = browser.find_element(By.TAG_NAME, "body")
        background = body.value_of_css_property("background-color")
        colours.add((background, fill(browser, "#timeline svg text")))
        keep(browser, theme)
    assert len({one for one, _ in colours}) == len({two for _, two in colours}) == 2

    # On a phone only wide elements scroll, each in its own box.
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True},
    )
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= 390
    keep(browser, "narrow")
    assert browser.get_log("browser") == []


def keep(browser: webdriver.Chrome, name: str) -> None:
    """Stores a screenshot of the whole page in $TFPREEMPT_SCREENSHOTS."""
    if folder := os.environ.get("TFPREEMPT_SCREENSHOTS"):
        shot = browser.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True}
        )
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))
