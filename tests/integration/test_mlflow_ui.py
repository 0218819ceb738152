"""`gradbench ui` as a real process, and what a real browser shows of a store that the uploader filled."""

import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from gradbench.record import Outcome
from gradbench.tracking.ui import ui as serve_ui
from tests.tracking.folders import add_steps, close, end, make_attempt, make_spec, make_sweep, start_uploader

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
UI = """
import sys, pathlib
from gradbench.tracking.ui import ui
sys.exit(ui(pathlib.Path(sys.argv[1]), None, int(sys.argv[2])))
"""


def fill(runs):
    """Make a store with a sweep of four cells, one of which failed and was rerun."""
    grid = [(optimizer, strategy) for optimizer in ("sgd", "adam") for strategy in ("standard", "checkpointing")]
    specs = [
        make_spec(f"{number:012x}", f"vit·{optimizer}·{strategy}·s0", optimizer=optimizer, strategy=strategy)
        for number, (optimizer, strategy) in enumerate(grid)
    ]
    sweep = make_sweep(runs, specs)
    make_attempt(sweep, specs[0], 3, Outcome.FAILED, reason="ValueError: x", train_loss=2.0)
    for number, spec in enumerate(specs):
        attempt = make_attempt(sweep, spec, 0, outcome=None)
        add_steps(attempt, range(1, 41), grad_norm=1.0 + number)
        end(attempt, updates=40, eval_loss=1.0 + number, peak_bytes=1e6 * (number + 1))
    process, _ = start_uploader(sweep)
    assert close(process) == (0, "")
    return [spec.name for spec in specs] + [f"{specs[0].name} #2"]


def start(runs, port):
    """Start the UI; return its process and its address."""
    words = [sys.executable, "-c", UI, str(runs), str(port)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdout.readline()
    return process, process.stdout.readline().strip()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A runs folder whose store is filled, and the names of its attempts."""
    runs = tmp_path_factory.mktemp("ui") / "runs"
    return runs, fill(runs)


@pytest.fixture(scope="module")
def address(store):
    with socket.socket() as taken:  # so that the UI has to choose another port
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process, address = start(store[0], taken.getsockname()[1])
    yield address
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    process.stdout.close()
    assert not any(child.is_running() for child in children)


@pytest.fixture
def browser(chromium, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    quiet = ("quic", "background-networking", "component-update", "sync", "gpu")
    for word in (
        "headless",
        "no-sandbox",
        "no-first-run",
        "window-size=1600,1000",
        *(f"disable-{name}" for name in quiet),
    ):
        options.add_argument(f"--{word}")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def wait_for_text(browser, *words):
    from selenium.webdriver.support.ui import WebDriverWait  # only where there is a browser

    def shown(driver):
        return all(word in driver.find_element("tag name", "body").text for word in words)

    WebDriverWait(browser, 60).until(shown, f"the page never showed all of {words}")


def test_the_printed_address_answers(address):
    with urllib.request.urlopen(f"{address.partition('#')[0]}health") as answer:
        assert answer.read() == b"OK"


@pytest.mark.browser
def test_a_browser_shows_the_attempts_and_their_metrics(address, store, browser):
    browser.get(address)
    wait_for_text(browser, *store[1], "20261201-120000")
    browser.find_element("link text", store[1][1]).click()
    wait_for_text(browser, "final/peak_bytes", "2000000", "train/loss", "optimizer.lr", "gradbench.outcome", "Finished")


def test_a_folder_without_results_gets_one_line(tmp_path):
    with pytest.raises(ValueError, match="no results yet"):
        serve_ui(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_server_is_only_named(tmp_path, capsys):
    assert serve_ui(tmp_path, "https://me:secret@mlflow.example") == 0
    assert capsys.readouterr().out == "tracking.uri is a server, which has the UI: https://mlflow.example\n"
