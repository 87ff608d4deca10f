#!/usr/bin/env python3
"""prometheus_test.py BUILD_DIR: asks a real Prometheus every query of the dashboard and of the alert rules.

Prometheus comes from Debian's package once, unpacked into BUILD_DIR and not installed. It scrapes a daemon with host
devices, under load, while an engine stands still and one is killed. Then it scrapes two daemons that form a cluster on
the loopback interface, with a group that spans them.
Exit status: 0 passed, 1 failed, 77 skipped because Prometheus can't be had.
"""
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/epd.json").read_text())
RULES_FILE = ROOT / "deploy/prometheus/epd.rules.yml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]
MANUAL = (ROOT / "deploy/OPERATING.md").read_text()
WAIT_S = 40
# Grafana replaces its variables by these.
VARIABLES = {"$__rate_interval": "8s", "$instance": ".*", "$group": ".*"}


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


# Only a cluster has these.
CLUSTER = re.compile(r"epd_(far|cluster)_")


def check(holds, text):
    if not holds:
        raise AssertionError(text)


def prometheus_programs(build):
    home = build / "deploy/prometheus"
    program = home / "usr/bin/prometheus"
    if not program.exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        done = subprocess.run(["apt-get", "download", "prometheus"], cwd=home, capture_output=True, text=True, timeout=240)
        packages = list(home.glob("prometheus_*.deb"))
        if done.returncode != 0 or not packages:
            skip(f"apt-get can't download prometheus: {done.stderr}")
        subprocess.run(["dpkg-deb", "--extract", packages[0], home], check=True, timeout=120)
        packages[0].unlink()
    return program, home / "usr/bin/promtool"


def free_port():
    """Below the ports that connections of other tests take."""
    for _ in range(1000):
        port = random.randrange(20000, 32000)
        with contextlib.closing(socket.socket()) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                found.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("no port of 20000 .. 31999 is free")


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


class Prometheus:
    def __init__(self, port):
        self.port = port

    def ask(self, query):
        """The series; a query that Prometheus refuses fails the test."""
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            return json.loads(get(url))["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error

    def becomes_true(self, query, seconds):
        """The series; none if there are none within that time."""
        end = time.monotonic() + seconds
        while not (found := self.ask(query)) and time.monotonic() < end:
            time.sleep(0.3)
        return found

    def must_become_true(self, query, seconds=WAIT_S):
        found = self.becomes_true(query, seconds)
        check(found, f"no data within {seconds} s: {query}")
        return found

    def must_become_false(self, query, seconds=WAIT_S):
        end = time.monotonic() + seconds
        while found := self.ask(query):
            check(time.monotonic() < end, f"true for {seconds} s: {query}: {found}")
            time.sleep(0.3)

    def is_up(self):
        try:
            return get(f"http://127.0.0.1:{self.port}/-/ready") != ""
        except OSError:
            return False


def soon(query):
    """The same over seconds: nothing here lasts for minutes."""
    return re.sub(r"\[\d+m\]", "[8s]", query)


def alert(name):
    return next(rule["expr"] for rule in RULES if rule["alert"] == name)


def test_documents():
    for rule in RULES:
        name, notes = rule["alert"], rule["annotations"]
        check(re.search(rf"^### {name}$", MANUAL, re.MULTILINE), f"{name} has no page in OPERATING.md")
        check(notes.get("description"), f"{name} has no description")
        url = f"file:///usr/share/doc/epd/OPERATING.md#{name.lower()}"
        check(notes.get("runbook_url") == url, f"runbook_url of {name}: {notes.get('runbook_url')}; must be {url}")


def group_of(site):
    groups = site.epctl("groups", "--json")["groups"]
    check(len(groups) == 1, f"groups: {groups}")
    return str(groups[0]["group_id"])


def waits_of_pairs(prometheus):
    found = prometheus.must_become_true("epd_rank_wait_seconds_total")
    return {(series["metric"]["rank"], series["metric"]["peer"]): float(series["value"][1]) for series in found}


class Site:
    """A daemon, a Prometheus that scrapes it, and what loads the daemon."""

    def __init__(self, build, program, work):
        self.build, self.work, self.program = build, work, program
        self.processes = []

    def begin(self):
        self.metrics = free_port()
        self.epd = self._start(
            "epd", self.build / "bin/epd", "serve", "--config", os.devnull, "--socket", self.work / "epd.sock",
            "--control-socket", self.work / "control.sock", "--devices.cuda", "none", "--devices.host", "2",
            "--metrics.listen", f"127.0.0.1:{self.metrics}",
        )
        self.scrape([self.metrics])

    def scrape(self, ports):
        work, program = self.work, self.program
        (work / "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES_FILE)],
            "scrape_configs": [{"job_name": "epd", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}],
        }))
        self.prometheus = Prometheus(free_port())
        self._start(
            "prometheus", program, f"--config.file={work}/prometheus.yml", f"--storage.tsdb.path={work}/data",
            f"--web.listen-address=127.0.0.1:{self.prometheus.port}", "--log.level=warn",
        )
        end = time.monotonic() + WAIT_S
        while not self.prometheus.is_up():
            check(time.monotonic() < end, "Prometheus does not start: " + (work / "prometheus.log").read_text())
            time.sleep(0.2)

    def _start(self, name, *command, **options):
        with open(self.work / f"{name}.log", "a") as log:
            process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options
            )
        self.processes.append(process)
        return process

    def load(self):
        return self._start(
            "epbench", self.build / "bin/epbench", "--socket", self.work / "epd.sock", "--ranks", "2", "--op", "both",
            "--tokens", "64", "--hidden", "512", "--iters", "1000000",
        )

    def tries_epctl(self, *command):
        return subprocess.run(
            [self.build / "bin/epctl", "--socket", self.work / "control.sock", *command],
            capture_output=True, text=True, timeout=60,
        )

    def epctl(self, *command):
        done = self.tries_epctl(*command)
        check(done.returncode == 0, f"epctl {command}: {done.stdout}{done.stderr}")
        return json.loads(done.stdout or "null")

    def end(self):
        for process in reversed(self.processes):
            process.kill()
            process.wait()


class ClusterSite(Site):
    """Two daemons of one device each. A group of two ranks spans them."""

    RANK = """
import array, sys, epd
rank = int(sys.argv[1])
group = epd.attach(sys.argv[2]).join(epd.GroupConfig(name="wide", rank=rank, num_ranks=2, num_experts=4, max_tokens=64,
                                                     hidden=256, topk=2, span=epd.Span.CLUSTER, timeout_ms=20000))
for number in range(10_000_000):
    buffers = group.buffers(number % 4)
    if number < 4:
        buffers.topk_idx[:] = array.array("i", [token % 4 for token in range(len(buffers.topk_idx))])
    dispatch = group.dispatch(number % 4, num_tokens=64)
    dispatch.wait(10000)
    group.combine(number % 4, dispatch.handle).wait(10000)
"""

    def begin(self):
        ports = [free_port() for _ in range(2)]
        self.metrics = [free_port() for _ in range(2)]
        for node, days in enumerate(("10", "90")):
            subprocess.run(
                [ROOT / "deploy/test-ca.sh", "--days", days, self.work, f"node-{node},127.0.0.1"],
                check=True, capture_output=True, timeout=60,
            )
        self.epds = [self._start_node(node, ports) for node in range(2)]
        self.ports = ports
        self.scrape(self.metrics)

    def _start_node(self, node, ports):
        return self._start(
            f"epd-{node}", self.build / "bin/epd", "serve", "--config", os.devnull,
            "--socket", self.work / f"{node}.sock", "--control-socket", self.work / f"{node}.control",
            "--devices.cuda", "none", "--devices.host", "1", "--network.devices", "lo",
            "--cluster.name", "test", "--cluster.node", f"node-{node}", "--cluster.tls_ca", self.work / "ca.pem",
            "--cluster.tls_cert", self.work / f"node-{node}.pem", "--cluster.tls_key", self.work / f"node-{node}.key",
            "--cluster.listen", f"127.0.0.1:{ports[node]}", "--cluster.advertise", f"127.0.0.1:{ports[node]}",
            "--cluster.coordinator", f"127.0.0.1:{ports[0]}", "--metrics.listen", f"127.0.0.1:{self.metrics[node]}",
        )

    def restart_node(self, node):
        self.epds[node] = self._start_node(node, self.ports)

    def load(self):
        own = {"PYTHONPATH": str(ROOT / "client/python"), "EPD_LIBRARY": str(self.build / "lib/libepd.so")}
        for node in range(2):
            self._start(
                f"rank-{node}", sys.executable, "-c", self.RANK, node, self.work / f"{node}.sock", env={**os.environ, **own}
            )


def test_cluster(site):
    prometheus = site.prometheus
    prometheus.must_become_true('count(up{job="epd"} == 1) == 2')
    prometheus.must_become_true('epd_cluster_nodes{state="up"} == 2')
    site.load()
    prometheus.must_become_true("count(epd_far_engine_connected == 1) == 2")
    asked = 0
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            if CLUSTER.search(target["expr"]):
                prometheus.must_become_true(target["expr"])
                asked += 1
    check(asked >= 7, f"only {asked} queries ask for the cluster")
    found = prometheus.must_become_true(alert("EpdCertificateExpires"))
    check(len(found) == 1 and 9 * 86400 < float(found[0]["value"][1]) < 10 * 86400, f"the one of ten days: {found}")
    for name in ("EpdNodeLost", "EpdNoCoordinator", "EpdFarMessagesDropped"):
        prometheus.must_become_false(alert(name))  # a node that was stopped for two seconds was lost, and came back
    text = get(f"http://127.0.0.1:{site.metrics[0]}/metrics")
    # A node dies and comes back. Then the coordinator dies, and the other node says so.
    site.epds[1].kill()
    found = prometheus.must_become_true(alert("EpdNodeLost"))
    check(len(found) == 1, f"of the node that lives: {found}")
    site.epds[1].wait()
    site.restart_node(1)
    prometheus.must_become_true('count(epd_cluster_nodes{state="up"} == 2) == 2')
    site.epds[0].kill()
    found = prometheus.must_become_true(alert("EpdNoCoordinator"))
    check(len(found) == 1, f"of the node that lives: {found}")
    return set(re.findall(r"^(epd_\w+)", text, re.MULTILINE))


def stop_while_others_wait(prometheus, engine):
    """Stops the engine of rank 1. If it stops between its last look at rank 0 and the answer to its client, nobody
    waits, and the wait that it showed last is not told. Then it goes on, and stops once more."""
    for _ in range(5):
        os.kill(engine, signal.SIGSTOP)
        if waits := prometheus.becomes_true("epd_group_waited_for_seconds > 1", 8):
            break
        os.kill(engine, signal.SIGCONT)
        prometheus.must_become_true("sum(rate(epd_group_operations_total[3s])) > 1")
    check({series["metric"]["rank"] for series in waits} == {"1"}, f"waited for: {waits}")


def test_site(site, of_clusters):
    prometheus = site.prometheus
    prometheus.must_become_true('up{job="epd"} == 1')
    for rule in RULES:
        prometheus.ask(rule["expr"])
    site.load()
    prometheus.must_become_true("sum(rate(epd_group_operations_total[8s])) > 1")

    # A rank's engine is stopped: metrics name the ranks that wait, and for whom.
    before = waits_of_pairs(prometheus)
    check(set(before) == {("0", "1"), ("1", "0")}, f"pairs: {before}")
    engines = [int(device["engine_pid"]) for device in site.epctl("devices", "--json")["devices"]]
    check(min(engines) > 0, f"engines: {engines}")  # 0 and -1 name many processes to kill(2)
    stop_while_others_wait(prometheus, engines[1])
    time.sleep(3)
    os.kill(engines[1], signal.SIGCONT)
    # The others' waits for rank 1 are added up, and each number is one that epctl tells too.
    late = prometheus.must_become_true(soon(alert("EpdRankLate")))
    late = {series["metric"]["rank"]: float(series["value"][1]) for series in late}
    check(max(late, key=late.get) == "1", f"late: {late}")
    after = waits_of_pairs(prometheus)
    more = {pair: after[pair] - before[pair] for pair in before}
    check(more["0", "1"] > 3 and more["0", "1"] > more["1", "0"], f"rank 1 was stopped for three seconds: {more}")
    told = {(str(pair["rank"]), str(pair["peer"])): (pair["ready_us"] + pair["arrived_us"]) / 1e6
            for group in site.epctl("waits", "--json", group_of(site))["groups"] for pair in group["pairs"]}
    check(all(told[pair] >= after[pair] for pair in after), f"epctl: {told}; Prometheus, before that: {after}")
    prometheus.must_become_true("sum(epd_rank_last_arrivals_total) > 0")
    check(not prometheus.ask(alert("EpdRowsUneven")), "uniform routing is even")

    # An engine dies while an operation waits for it: the load fails, and is started again.
    stop_while_others_wait(prometheus, engines[1])
    found = prometheus.must_become_true(re.sub(r"5m", "3s", alert("EpdDeviceBusy")))
    check("host:0" in {series["metric"]["device"] for series in found}, f"host:0 waits all the time: {found}")
    os.kill(engines[1], signal.SIGKILL)
    prometheus.must_become_true(alert("EpdEngineRestarted"))
    prometheus.must_become_true(alert("EpdOperationsFail"))
    site.processes[-1].wait(120)
    site.load()
    for name in ("EpdLimitNear", "EpdUserLimitNear", "EpdDescriptorsNear", "EpdControlPlaneFails"):
        check(not prometheus.ask(alert(name)), f"{name} fires without a reason")
    site.epctl("--json", "set", "limits", "max_sessions=2")
    found = prometheus.must_become_true(alert("EpdLimitNear"))
    check({series["metric"]["limit"] for series in found} == {"limits.max_sessions"}, f"near: {found}")
    site.epctl("--json", "set", "limits", "max_groups_per_user=1")
    found = prometheus.must_become_true(alert("EpdUserLimitNear") + ' and on (limit) epd_user_limit{limit=~".*groups.*"}')
    check({series["metric"]["uid"] for series in found} == {str(os.getuid())}, f"near: {found}")
    # A call is refused, and counted as that.
    check(site.tries_epctl("op", "7:7").returncode != 0, "there is no such operation")
    prometheus.must_become_true('epd_rpc_failed_total{method="GetOperation",status="NOT_FOUND"} > 0')
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            if CLUSTER.search(target["expr"]):
                continue  # test_cluster
            # Nobody waits now, as shown above, and nothing fails.
            if "waited_for" in target["expr"] or 'status!="OK"' in target["expr"]:
                prometheus.ask(target["expr"])
            else:
                prometheus.must_become_true(target["expr"])
    print(f"{len(DASHBOARD['panels'])} panels have data")
    for variable in DASHBOARD["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        if asked:
            found = prometheus.must_become_true(asked.group(1))
            check(all(asked.group(2) in series["metric"] for series in found), variable["query"])

    text = get(f"http://127.0.0.1:{site.metrics}/metrics")
    used = set(re.findall(r"\bepd_\w+", RULES_FILE.read_text() + json.dumps(DASHBOARD)))
    served = set(re.findall(r"^(epd_\w+)", text, re.MULTILINE)) | {"epd_group_waited_for_seconds"} | of_clusters
    check(used <= served, f"asked for, and not served: {used - served}")
    print(f"{len(text.splitlines())} lines, {len(text)} bytes for two devices and one group")

    site.epd.kill()
    prometheus.must_become_true(alert("EpdDown"))


def run(kind, build, program, directory, test, *arguments):
    directory.mkdir()
    site = kind(build, program, directory)
    try:
        site.begin()
        return test(site, *arguments)
    except AssertionError:
        for log in sorted(directory.glob("*.log")):
            print(f"---- {log.name}\n{log.read_text()[-3000:]}")
        raise
    finally:
        site.end()


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    program, promtool = prometheus_programs(build)
    done = subprocess.run([promtool, "check", "rules", RULES_FILE], capture_output=True, text=True, timeout=60)
    check(done.returncode == 0, done.stdout + done.stderr)
    rules_test = pathlib.Path(__file__).with_name("rules_test.yml")
    done = subprocess.run([promtool, "test", "rules", rules_test], capture_output=True, text=True, timeout=60)
    check(done.returncode == 0, done.stdout + done.stderr)
    test_documents()
    with tempfile.TemporaryDirectory(prefix="epd-prometheus-test-") as directory:
        of_clusters = run(ClusterSite, build, program, pathlib.Path(directory) / "cluster", test_cluster)
        run(Site, build, program, pathlib.Path(directory) / "one", test_site, of_clusters)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        sys.exit(1)
