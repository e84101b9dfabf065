"""The page in a real Chromium, over a real run: a server and its workers, each a process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.keys import Keys
from typer.testing import CliRunner

from browser import Browser, open_browser
from clusters import Cluster
from demo_terminal import DemoTerminal
from outerstep.cli import app
from outerstep.dashboard.library import chart_library
from outerstep.security import Credentials
from outerstep.server import DiLoCoServer
from outerstep.types import Dataset, Lease
from peers import start_peers, stop_peers
from support import memory_worker, tiny_model, wait_until

pytestmark = pytest.mark.slow

HOSTILE = """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>"""
LEFT, RIGHT = "constructor", "__proto__"  # names that every object of the page's language knows
SCRIPT = f"""
import pathlib, socket, sys, time, torch, outerstep
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support import tiny_model
socket.gethostname = lambda: {HOSTILE!r}
model, name, folder = tiny_model(), sys.argv[1], pathlib.Path(__file__).parent
optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
with outerstep.attach(model, optimizer) as worker:
    step = 0
    while not (folder / "stop").exists():
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + (name == {LEFT!r})))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        worker.last_loss = loss
        step += 1
        time.sleep(0.05)
"""
LOSS = "#loss-chart .plot"
LIVE = "live"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    identity = Credentials().server_identity()
    certificate = (Credentials().server_folder / "certificate.pem").read_bytes()
    assert identity.fingerprint
    with open_browser(tmp_path_factory.mktemp("profile"), certificate) as made:
        yield made


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.console, chromium.asked = [], set()
    yield chromium
    chromium.driver.get("about:blank")
    chromium.read_logs()


def open_page(browser: Browser, link: str) -> str:
    """The address that it asks from then on."""
    browser.driver.get(link)
    wait_until(lambda: browser.text("#line") == LIVE)
    return browser.driver.current_url.removesuffix("/page")


def check_quiet(browser: Browser, *asked: str) -> None:
    """Nothing went wrong in the page, and it asked nobody else for anything."""
    browser.read_logs()
    assert browser.console == []
    assert browser.asked == set(asked)


def points(browser: Browser) -> int:
    """Of all curves, as a screen reader is told."""
    found = re.search(r"(\d+) points", browser.run(f"return document.querySelector('{LOSS}').ariaLabel"))
    return int(found[1]) if found else 0


def test_the_demo_is_watched_by_the_link_that_it_prints(tmp_path: Path, browser: Browser) -> None:
    with DemoTerminal(tmp_path, "--steps", "4000", "--sync-every", "5") as demo:
        address = open_page(browser, demo.link())
        assert address.startswith("http://127.0.0.1:"), "no certificate is in its way"
        try:
            wait_until(lambda: {"worker-0", "worker-1"} <= set(browser.text("#workers").split()))
        except AssertionError as error:
            raise AssertionError(f"the page: {browser.text('body')[:2000]}\nthe demo: {demo.said[-2000:]}") from error
        wait_until(lambda: int(browser.text("#tiles dd") or 0) >= 2)
        wait_until(lambda: {"worker-0", "worker-1"} <= set(browser.text("#loss-chart .legend").split()))
        before = points(browser)
        wait_until(lambda: points(browser) >= before + 6)
        for line in ("c0", "c1"):
            assert browser.pixels(f"{LOSS} canvas", line) > 20, "a curve in the colour of its worker"
        print("screenshot:", browser.take_picture("demo"))
        check_quiet(browser, address)
        assert demo.interrupt() != 0
    wait_until(lambda: browser.text("#line") in ("reconnecting", "no answer"))


def test_a_run_is_watched_from_its_first_worker_to_a_death(tmp_path: Path, browser: Browser) -> None:
    flags = ("-n", "2", "--sync-every", "5", "--heartbeat-timeout", "20", "--remote-control", "--save-dir", "run")
    with Cluster(tmp_path, *flags) as cluster:
        (tmp_path / "train.py").write_text(SCRIPT)
        said = CliRunner().invoke(app, ["page", "--server", cluster.address])
        assert said.exit_code == 0, said.output
        assert open_page(browser, said.stdout.strip()) == f"https://{cluster.address}", "the code is not kept there"
        assert browser.run("return document.cookie") == "", "no script can read the session"
        watch_workers_come(browser, cluster)
        read_with_the_keyboard(browser)
        watch_one_die(browser, cluster)
        give_an_order(browser)
        browser.driver.refresh()
        wait_until(lambda: browser.text("#line") == LIVE)
        draw_a_hierarchy(browser)
        fit_a_phone(browser)
        check_quiet(browser, f"https://{cluster.address}")
        browser.driver.get("about:blank")
        open_page(browser, said.stdout.strip())  # a link that was used, where the session is open
        said = CliRunner().invoke(app, ["control", "--server", cluster.address, "shutdown"])
        assert said.exit_code == 0, said.output


def test_a_peers_page_shows_the_others_on_its_map(browser: Browser) -> None:
    peers = start_peers(3)
    try:
        address = open_page(browser, peers[0].node.page_link())
        wait_until(lambda: {"a", "b", "c"} <= set(browser.text("#map").split()))
        assert "this peer" in browser.text("#map")
        for number, peer in enumerate(peers):
            peer.offer(0, number + 1)
        for peer in peers:
            peer.take(0)
        wait_until(lambda: "Fragment 0, version 2 is open" in browser.text("#fragments"))
        peers.pop().node.stop()
        wait_until(lambda: browser.text("#workers tr.gone").startswith("c"))
        wait_until(lambda: browser.run("return document.querySelectorAll('#map .node').length") == 2)
        print("screenshot:", browser.take_picture("peer"))
        check_quiet(browser, address)
    finally:
        stop_peers(peers)


def test_a_run_that_leases_data_shows_how_far_it_is(browser: Browser) -> None:
    server = DiLoCoServer(tiny_model().state_dict(), 1, port=0, host="127.0.0.1")
    server.start()
    try:
        address = open_page(browser, server.page_link())
        assert browser.run("return document.querySelector('#data').hidden"), "this run leases none yet"
        leases = server.service.coordinator.leases
        for worker_id, places in ((LEFT, ((0, 6),)), (RIGHT, ((6, 10),))):
            dataset = Dataset(name="train", samples=40, unit_samples=4)
            head = {"run_id": "run", "worker_id": worker_id, "incarnation": 1, "dataset": dataset}
            leases.lease(Lease(**head, number=1, want=places[0][1] - places[0][0], pace=1.0), 0.0, {worker_id})
        table = leases.tables["train"]
        table.accept(LEFT, 0, 1, ((0, 3),), 1.0)
        table.closed(0, 1, (), 1)
        table.gone(LEFT)
        wait_until(lambda: not browser.run("return document.querySelector('#data').hidden"))
        wait_until(lambda: "30 %" in browser.text("#datasets"))
        assert browser.text("#datasets tbody tr").split()[:7] == ["train", "10", "3", "30", "%", "4", "3"]
        browser.run("document.querySelector('#data details').open = true")
        wait_until(lambda: LEFT in browser.text("#data-workers"))
        assert f"train {RIGHT} 0 4" in " ".join(browser.text("#data-workers").split())
        assert "from above" not in browser.text("#datasets")
        leases.is_below, below = True, Dataset(name="below", samples=40, unit_samples=4)
        leases.lease(Lease(**{**head, "dataset": below}, number=1, want=2, waits=True), 0.0, {RIGHT})
        wait_until(lambda: "0, waiting for the layer above" in browser.text("#datasets"))
        check_quiet(browser, address)
    finally:
        server.stop()


def test_a_live_hierarchy_is_a_map(tmp_path: Path, browser: Browser) -> None:
    """Three servers and two workers, each a process: a page of the top, and one of a cluster in the middle."""
    places = {name: tmp_path / name for name in ("top", "east", "west")}
    for place in places.values():
        place.mkdir()
    runs = {"top": Cluster(places["top"], "-n", "2")}
    try:
        for name in ("east", "west"):
            said = ("-n", "1", "--sync-every", "5", "--above", runs["top"].address, "--above-every", "2")
            runs[name] = Cluster(places[name], *said, "--cluster", name)
            runs[name].worker(f"{name}-gpu")
        wait_until(lambda: runs["top"].round() >= 2)
        see_the_map(browser, runs["top"], "east", "west", "server")
        see_the_map(browser, runs["east"], "east", "east-gpu", "layer above", runs["top"].address)
    finally:
        for run in runs.values():
            run.close()


def test_where_the_chart_library_could_not_be_fetched_the_page_shows_tables(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = dataclasses.replace(chart_library(), folder=tmp_path)
    monkeypatch.setattr("outerstep.dashboard.files.chart_library", lambda: lost)
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0) as server:
        open_page(browser, server.page_link())
        assert "python -m outerstep.dashboard.library" in browser.text("#no-charts")
        assert "worker" in browser.text("#loss-table"), "its table is open"
        browser.read_logs()
        assert browser.console, "what the page could not load is all that is said"
        assert all("/page/uplot." in line for line in browser.console), browser.console


def test_before_the_first_round_those_who_have_not_joined_are_counted_as_missing(browser: Browser) -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0) as server:
        model = tiny_model()
        with memory_worker(server, "first", model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
            open_page(browser, server.page_link())
            wait_until(lambda: "0 of 2 have contributed" in browser.text("#fragments"))
            worker.abandon("it has been seen")


def see_the_map(browser: Browser, run: Cluster, *names: str) -> None:
    said = CliRunner().invoke(app, ["page", "--server", run.address])
    assert said.exit_code == 0, said.output
    address = open_page(browser, said.stdout.strip())
    wait_until(lambda: all(name in browser.text("#map") for name in names))
    print("screenshot:", browser.take_picture(f"hierarchy-{run.folder.name}"))
    check_quiet(browser, address)
    browser.console, browser.asked = [], set()
    browser.driver.get("about:blank")


def watch_workers_come(browser: Browser, cluster: Cluster) -> None:
    assert LEFT not in browser.text("#workers")
    for name in (LEFT, RIGHT):
        cluster.worker(name, heartbeat_interval_s=1)
    wait_until(lambda: {LEFT, RIGHT} <= set(browser.text("#workers").split()))
    assert HOSTILE in browser.text("#workers"), "a hostile name is text"
    assert HOSTILE in browser.text("#told")
    assert browser.run("return document.querySelectorAll('img[src=x], script:not([src^=page])').length") == 0
    wait_until(lambda: cluster.round() >= 2)
    wait_until(lambda: len(browser.text("#loss-chart .legend").splitlines()) == 3)  # two workers, and the rounds' mean
    before = points(browser)
    wait_until(lambda: points(browser) >= before + 4)
    # Each of them: two workers that train the same data have the same loss, and one curve covers the other.
    wait_until(lambda: all(browser.pixels(f"{LOSS} canvas", line) > 20 for line in ("c0", "c1", "ink")))
    print("screenshot:", browser.take_picture("two-workers"))
    assert "owned" not in browser.driver.title


def read_with_the_keyboard(browser: Browser) -> None:
    chart = browser.driver.find_element("css selector", LOSS)
    browser.run("arguments[0].focus()", chart)
    chart.send_keys(Keys.ARROW_LEFT)
    assert LEFT in browser.text("#loss-chart .tip")
    wait_until(lambda: LEFT in browser.text("#loss-chart [aria-live]"))


def watch_one_die(browser: Browser, cluster: Cluster) -> None:
    doomed = cluster.children[-1]
    doomed.kill()
    doomed.wait()
    wait_until(lambda: f"{RIGHT} has been silent for" in browser.text("#alerts"))
    first = browser.text("#alerts")
    assert "it counts as dead" in first
    spoken = browser.text("#said")
    assert spoken.startswith(f"{RIGHT} is silent; in ")
    wait_until(lambda: browser.text("#alerts") not in (first, ""))  # it counts down
    assert browser.text("#said") == spoken, "and is not read out each second"
    wait_until(lambda: "died" in browser.text("#workers tr.gone"))
    assert RIGHT in browser.text("#workers tr.gone")
    assert browser.text("#said").startswith(f"{RIGHT} died")
    assert f"{RIGHT} died" in browser.text("#told")
    wait_until(lambda: browser.text("#alerts") == "")
    now = cluster.round()
    wait_until(lambda: cluster.round() > now)


def give_an_order(browser: Browser) -> None:
    find = browser.driver.find_element
    assert not find("id", "orders").is_displayed()
    find("id", "admin").send_keys(Credentials().tokens.load().admin + Keys.ENTER)
    find("css selector", "[data-order=save]").click()
    assert find("id", "ask").is_displayed(), "nothing happens without a confirmation"
    find("id", "ask-yes").click()
    wait_until(lambda: "state-round-" in browser.text("#answer"))


def draw_a_hierarchy(browser: Browser) -> None:
    """A status of a server in the middle: a layer above, clusters with members, one that died, a way around."""
    clusters = {
        "east": {"size": 40, "members": [f"{HOSTILE}{i}" for i in range(8)]},
        "west": {"size": 1, "members": []},
    }
    link = {"source": "east", "target": "server", "bytes_per_s": 2e6, "latency_s": 0.04}
    status = {
        "mode": "sync",
        "sync_round": 3,
        "workers": {"east": {"step": 1, "state": "TRAINING"}, "west": {"step": 2}},
        "clusters": clusters,
        "links": [link],
        "above": {"cluster": HOSTILE, "address": "10.0.0.1:8512", "versions": [4], "exchanges": 2, "failure": ""},
        "layer": {"plan": {"sends_to": {"west": "east"}}},
    }
    peers = {"mode": "gossip", "silent": ["b"], "members": [{"peer_id": n, "address": HOSTILE} for n in ("a", "b")]}
    drawn = browser.driver.execute_async_script(
        """const [tree, peers, done] = arguments;
        import("/page/map.js").then(({ drawMap }) => {
            const gone = { north: { how: "death" } }, number = (svg, what) => svg.querySelectorAll(what).length;
            const made = [tree, peers].map((status) => drawMap(status, gone, new Set(["west"]), 900));
            done(made.map((svg) => [number(svg, ".node"), number(svg, "img, script"), svg.textContent]));
        }, (error) => done(String(error)));""",
        status,
        peers,
    )
    (nodes, alive, text), (others, _, _) = drawn
    assert (nodes, alive, others) == (5, 0, 2)  # the layer above, this server, two clusters, and one that died
    assert "cluster of 40" in text
    assert "2.0 MB/s" in text
    assert "… 35 more" in text
    assert "onerror" in text


def fit_a_phone(browser: Browser) -> None:
    """Light and dark; nothing is wider than the screen."""
    browser.emulate(phone=True)
    wait_until(lambda: browser.run("return innerWidth") == 390)
    wait_until(lambda: browser.run("return document.documentElement.scrollWidth") <= 390)
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    light = browser.run(ground)
    browser.emulate(dark=True, phone=True)
    wait_until(lambda: browser.run(ground) != light)
    wait_until(lambda: browser.pixels(f"{LOSS} canvas", "c0") > 20)  # in the colours of the dark
    picture = browser.take_picture("phone-dark")
    assert picture.stat().st_size > 10_000
    print("screenshot:", picture)
    browser.emulate()
