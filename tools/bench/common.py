"""What the measuring scripts share: the machine, versions, files that are never left half written, a running server."""

import datetime
import http.client
import json
import os
import platform
import re
import signal
import subprocess

INTERESTING = ("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "hypervisor")


def machine():
    """As much as Linux tells."""
    cpuinfo = open("/proc/cpuinfo").read()
    field = lambda name: (re.search(rf"^{name}\s*: (.*)$", cpuinfo, re.M) or [None, "?"])[1]
    flags = set(field("flags").split())
    caches = {}
    base = "/sys/devices/system/cpu/cpu0/cache"
    for index in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        if index.startswith("index"):
            read = lambda name: open(f"{base}/{index}/{name}").read().strip()
            if read("type") != "Instruction":
                caches["L" + read("level")] = read("size")
    memory = int(re.search(r"MemTotal:\s*(\d+)", open("/proc/meminfo").read())[1]) * 1024
    return {
        "cpu": field("model name"), "family": field("cpu family"), "model": field("model"), "cpus": os.cpu_count(),
        "flags": [flag for flag in INTERESTING if flag in flags], "caches": caches, "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()}",
    }


def folio_version(binary):
    text = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    try:
        here = os.path.dirname(os.path.abspath(__file__))
        commit = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return f"{text} {commit}".strip()


def now():
    return datetime.datetime.now().isoformat(timespec="seconds")


def save(path, value):
    """All or nothing: a run that is stopped while writing keeps what it had."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".part", "w") as out:
        json.dump(value, out, indent=1)
        out.write("\n")
    os.replace(path + ".part", path)


def resume(path, arguments):
    """What an earlier run with the same arguments left, or nothing. Other arguments are refused."""
    if not path or not os.path.exists(path):
        return None
    with open(path) as file:
        old = json.load(file)
    changed = {k for k, v in arguments.items() if k != "rounds" and old.get("arguments", {}).get(k) != v}
    if changed:
        raise SystemExit(f"{path} was measured with other arguments ({', '.join(sorted(changed))}): remove it or write elsewhere")
    return old


def cpu_seconds(pid):
    """Of all threads of a process so far."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid):
    """Bytes."""
    fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)
    return {k: int(fields[k].split()[0]) * 1024 for k in ("VmRSS", "VmHWM", "RssAnon", "RssFile")}


class Server:
    """`folio serve` on a free port, stopped at the end of a `with`."""

    def __init__(self, folio, model, flags=(), cgroup=None):
        command = [folio, "serve", model, "--port", "0", *flags]
        if cgroup:
            command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', cgroup, *command]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = ""
        for line in self.process.stderr:
            self.log += line
            if line.startswith("listening on http://"):
                self.address = line.split("http://", 1)[1].split()[0]
                return
        raise SystemExit(f"{' '.join(command)} ended:\n{self.log}")

    @property
    def pid(self):
        return self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def get(self, path):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def stream(self, body):
        """Yields the JSON chunks of a completion as they arrive."""
        connection = http.client.HTTPConnection(self.address, timeout=3600)
        connection.request("POST", "/v1/completions", json.dumps(dict(body, stream=True)), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"HTTP {answer.status}: {answer.read().decode()[:500]}")
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])
        connection.close()
