#!/usr/bin/env python3
"""Holds what is in deploy/ against the tools that read it, and a binary.

    python3 tests/deploy/check.py target/release/folio [FOLDER]

Prometheus's own promtool checks the rules, runs their cases (rules.test.yml), and lints /metrics of a server; then a Prometheus scrapes that
server for a few seconds with the rules, and every expression of the dashboard is asked of it. The Dockerfile and the unit are read: what they
copy is there, the binary has every flag and variable that they name, and systemd's own tool says how much the unit leaves open. FOLDER: a folder with promtool and prometheus; without it those on PATH.
Standard library only.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
RULES = os.path.join(ROOT, "deploy", "prometheus", "folio.rules.yml")
DASHBOARD = os.path.join(ROOT, "deploy", "grafana", "folio.json")
DOCKERFILE = os.path.join(ROOT, "deploy", "Dockerfile")
UNIT = os.path.join(ROOT, "deploy", "systemd", "folio.service")
# Names are vLLM's and in vLLM's manner: a prefix with a colon, and one histogram that it calls a total.
LINT = re.compile(r"^(vllm|folio):\w+ metric names should not contain ':'$|^vllm:iteration_tokens_total non-counter metrics should not have \"_total\" suffix$")
SCRAPE_SECONDS = 1
PATIENCE_SECONDS = 20

sys.path.insert(0, os.path.join(HERE, "..", "clients"))


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **more)
    return done.returncode, done.stdout + done.stderr


def check(what, is_so, told=""):
    if not is_so:
        sys.exit(f"{what}: FAILED\n{told}")
    print(f"{what}: ok")


def expressions():
    """Of the dashboard, as Grafana would send them with everything chosen."""
    with open(DASHBOARD) as file:
        panels = json.load(file)["panels"]
    written = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [one.replace("$__rate_interval", "10s").replace("$model", ".*").replace("$instance", ".*") for one in written]


def check_rules(promtool):
    code, told = run(promtool, "check", "rules", RULES)
    check("promtool check rules", code == 0, told)
    code, told = run(promtool, "test", "rules", "rules.test.yml", cwd=HERE)
    check("promtool test rules", code == 0, told)
    with open(RULES) as file, open(os.path.join(HERE, "rules.test.yml")) as cases:
        alerts, text = re.findall(r"- alert: (\w+)", file.read()), cases.read()
    fires = [name for name in alerts if f'alertname="{name}"' in text]
    check(f"each of {len(alerts)} alerts has a case in which it fires", fires == alerts, str(set(alerts) - set(fires)))


def check_metrics(promtool, server):
    code, told = run(promtool, "check", "metrics", input=server.get("/metrics"))
    strange = [line for line in told.splitlines() if line.strip() and not LINT.match(line)]
    # 3: only lint. What cannot be read is 1.
    check("promtool check metrics", code in (0, 3) and not strange, "\n".join(strange) or told)


def check_scraped(promtool, prometheus, server):
    """A Prometheus with the server as its only target."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "prometheus.yml")
        with open(config, "w") as file:
            json.dump({
                "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
                "rule_files": [os.path.realpath(RULES)],
                "scrape_configs": [{"job_name": "folio", "static_configs": [{"targets": [urllib.parse.urlparse(server.url).netloc]}]}],
            }, file)
        code, told = run(promtool, "check", "config", config)
        check("promtool check config", code == 0, told)
        log = open(os.path.join(folder, "log"), "w+")
        process = subprocess.Popen([prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"],
                                   stdout=log, stderr=log)
        try:
            asked(address, server)
        except OSError as error:
            log.seek(0)
            sys.exit(f"prometheus: {error}\n{log.read()}")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)


def asked(address, server):
    def api(path, **query):
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as response:
            return json.load(response)["data"]

    def wait(what, until):
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if until():
                    return
            except OSError:
                # It is not there yet.
                pass
            if time.monotonic() > end:
                raise OSError(f"{what} did not come within {PATIENCE_SECONDS} s")
            time.sleep(0.2)

    # A rate needs two scrapes, and something between them.
    wait("the first scrape", lambda: api("query", query='up{job="folio"} == 1')["result"])
    for _ in range(4):
        server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
        time.sleep(SCRAPE_SECONDS)
    wait("a rate", lambda: api("query", query="rate(vllm:generation_tokens_total[10s]) > 0")["result"])
    rules = [rule for group in api("rules")["groups"] for rule in group["rules"]]
    wrong = [rule for rule in rules if rule["health"] == "err"]
    check(f"{len(rules)} rules are evaluated", rules and not wrong, json.dumps(wrong, indent=1))
    # An expression that cannot be read is an HTTP error.
    answers = {one: api("query", query=one)["result"] for one in expressions()}
    empty = [one for one, answer in answers.items() if not answer]
    # Tiers and drafts are not there; all else is.
    beyond = [one for one in empty if not re.search("tier_loads|spec_decode|external_prefix|http_requests|admission_rejections", one)]
    check(f"{len(answers)} expressions of the dashboard have an answer", not beyond, "\n".join(beyond))


def check_packages(folio):
    """What the Dockerfile and the unit take for granted."""
    help_text = run(folio, "serve", "--help")[1]
    flags, variables = set(re.findall(r"--[a-z][a-z0-9-]*", help_text)), set(re.findall(r"FOLIO_[A-Z0-9_]+", help_text))
    with open(DOCKERFILE) as file, open(UNIT) as unit_file:
        docker, unit = file.read(), unit_file.read()
    lines = docker.replace("\\\n", " ").splitlines()
    of = lambda word: [line.split(None, 1)[1] for line in lines if line.startswith(word + " ")]
    stages = [re.search(r" AS (\w+)$", line) for line in of("FROM")]
    names = [stage[1] for stage in stages if stage]
    made = " ".join(of("RUN"))
    for copy in of("COPY"):
        options = dict(re.findall(r"--(\w+)=(\S+)", copy))
        source = re.sub(r"--\S+ ", "", copy).split()[0]
        if "from" in options:
            # What an earlier stage made: below its folder as cargo has it, or by its own command.
            path = source.removeprefix("/src/")
            check(f"COPY {copy}", options["from"] in names and (path in made or source in made), made)
        else:
            check(f"COPY {copy}", os.path.exists(os.path.join(ROOT, source)))
    check("its package is one of the workspace", os.path.isfile(os.path.join(ROOT, "crates", re.search(r"cargo build .*-p (\w+)", made)[1], "Cargo.toml")))
    entry = json.loads(of("ENTRYPOINT")[0])
    copied = [re.sub(r"--\S+ ", "", copy).split()[1] for copy in of("COPY")]
    check("its ENTRYPOINT was copied", entry[0] in copied, str(copied))
    # The commands in the comments, too.
    commands = [json.loads(of("CMD")[0])]
    commands += [shlex.split(line.split(" folio serve ")[1]) for line in lines if line.startswith("#") and " folio serve " in line]
    commands += [shlex.split(line.split("folio serve", 1)[1]) for line in unit.splitlines() if line.startswith("ExecStart=")]
    named = {word for command in commands for word in command if word.startswith("--")} | set(re.findall(r"--[a-z][a-z-]+", " ".join(
        line for line in (docker + unit).splitlines() if line.startswith("#") and "drain" in line)))
    check(f"flags {' '.join(sorted(named))}", named <= flags, str(named - flags))
    wanted = set(re.findall(r"FOLIO_[A-Z0-9_]+", docker + unit)) - {"FOLIO_MODEL"}
    check(f"variables {' '.join(sorted(wanted))}", wanted <= variables, str(wanted - variables))
    # It parses them: what is wrong is the port, and nothing before that.
    code, told = run(folio, *commands[0], "--port", "none")
    check("CMD is parsed", code == 2 and "--port" in told and "none" in told, told)
    check("EXPOSE is the default port", f"[default: {of('EXPOSE')[0]}]" in help_text)
    if shutil.which("systemd-analyze"):
        code, told = run("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=15", UNIT)
        check("the unit is exposed by 1.5 of 10 at most", code == 0, told)


def main():
    folio = os.path.realpath(sys.argv[1])
    tools = [shutil.which(name, path=sys.argv[2] if len(sys.argv) > 2 else None) for name in ("promtool", "prometheus")]
    check_packages(folio)
    if None in tools:
        print("NOT CHECKED: rules, metrics and the dashboard want promtool and prometheus, which are not here")
        return
    check_rules(tools[0])
    os.environ["FOLIO_BIN"] = folio
    from folio_server import Server
    server = Server()
    try:
        server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
        check_metrics(tools[0], server)
        check_scraped(*tools, server)
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)


if __name__ == "__main__":
    main()
