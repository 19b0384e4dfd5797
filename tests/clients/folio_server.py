"""Starts a folio server on a free port and reads its metrics. Only the standard library."""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
import urllib.request

START_SECONDS = 120


class Server:
    """A running `folio serve`."""

    def __init__(self, *args):
        binary = os.environ.get("FOLIO_BIN")
        assert binary, "set FOLIO_BIN to the folio binary, or use tests/clients/run.sh"
        extra = shlex.split(os.environ.get("FOLIO_CLIENTS_ARGS", ""))
        command = [binary, "serve", *extra, "--port", "0", *args]
        self.log, self.url, self.admin = [], None, None
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.listening = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        self.listening.wait(START_SECONDS)
        if self.url is None:
            self.process.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            operators = re.search(r"operators +(https?://\S+)", line)
            if operators:
                self.admin = operators[1]
            found = re.search(r"listening on (https?://\S+)", line)
            if found:
                self.url = found[1]
                self.listening.set()
        # The process ended: whoever waits for it to listen should not wait for long.
        self.listening.set()

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return response.read().decode()

    def post(self, path, body):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.loads(response.read())

    def metrics(self):
        """{(name, frozenset of label pairs without model_name): value}"""
        out = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith("#"):
                continue
            name, labels, value = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line).groups()
            pairs = frozenset(p for p in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "") if p[0] != "model_name")
            out[name, pairs] = float(value)
        return out

    def metric(self, name, **labels):
        return self.metrics()[name, frozenset(labels.items())]

    def wait_idle(self, seconds=60):
        """Until nothing runs or waits and no block is held; fails when that takes too long."""
        end = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            held = [
                metrics["vllm:num_requests_running", frozenset()],
                metrics["vllm:num_requests_waiting", frozenset()],
                metrics["folio:kv_cache_blocks", frozenset({("state", "active")})],
            ]
            if not any(held):
                # The page before told the engine's state after the server's counters, which may have lagged behind it.
                return self.metrics()
            assert time.monotonic() < end, f"running, waiting, active blocks are still {held}"
            time.sleep(0.02)

    def rss_bytes(self):
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def stop(self, seconds=30):
        """Ends the server; returns its exit status."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
