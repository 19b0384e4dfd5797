"""Real agents do a task with a tool against the real server around a scripted model, without a network.

    python3 tests/clients/agents/run.py target/debug/examples/scripted target/ci-agents/node_modules [agent...]

The second folder is what `npm install` made of this folder's package.json. Each agent is asked to make a file, is told by the model which tool
to call, and must run it, send the result back, and print the model's last words. Only the standard library.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TASK = "Make a file made.txt with the word folio"
LAST = "Done: it is there."
SECONDS = 60
HERE = Path(__file__).resolve().parent


def alone():
    """Goes on in a network of its own with nothing but loopback, where the system allows it."""
    if os.environ.get("FOLIO_ALONE"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            flags = struct.pack("16sh22x", b"lo", 0x1 | 0x40)
            fcntl.ioctl(any_socket, 0x8914, flags)
        return
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode == 0:
        os.environ["FOLIO_ALONE"] = "1"
        os.execv(unshare, [unshare, "-rn", sys.executable, *sys.argv])
    print("no network of its own here: the agents see this machine's, but for a proxy that is not there")


def serve(binary, log):
    process = subprocess.Popen([binary, "0", HERE / "script.json"], stderr=subprocess.PIPE, text=True)
    address = None
    for line in process.stderr:
        log.append(line)
        found = re.search(r"listening on (http://\S+)", line)
        if found:
            address = found[1]
            break
    assert address, "the server did not start:\n" + "".join(log)
    threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()
    return process, address


def claude_code(modules, home, url):
    packages = modules / "@anthropic-ai"
    binary = next(path for path in packages.glob("claude-code-linux-*/claude") if "musl" not in str(path))
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    return [binary, "-p", TASK, "--allowedTools", "Bash"], environment


def codex(modules, home, url):
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "folio"\nmodel_provider = "folio"\n[model_providers.folio]\nname = "folio"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "FOLIO_KEY"\n'
    )
    command = [modules / ".bin/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    return command, {"FOLIO_KEY": "none"}


def opencode(modules, home, url):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url + "/v1", "apiKey": "none"},
        "models": {"folio": {"name": "folio", "tool_call": True, "limit": {"context": 100000, "output": 4096}}},
    }
    settings = {"provider": {"folio": provider}, "permission": "allow", "autoupdate": False, "share": "disabled"}
    (home / "work/opencode.json").write_text(json.dumps(settings))
    binary = next(path for path in modules.glob("opencode-linux-*/bin/opencode") if "baseline" in str(path))
    return [binary, "run", "--model", "folio/folio", TASK], {"OPENCODE_DISABLE_MODELS_FETCH": "1"}


AGENTS = {"claude-code": claude_code, "codex": codex, "opencode": opencode}


def run(name, modules, url):
    with tempfile.TemporaryDirectory(prefix="folio-agent-", dir=os.environ.get("FOLIO_AGENT_HOMES")) as folder:
        home = Path(folder)
        work = home / "work"
        work.mkdir()
        subprocess.run(["git", "init", "-q", work], check=True)
        command, environment = AGENTS[name](modules, home, url)
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        if not os.environ.get("FOLIO_ALONE"):
            kept |= {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=work, env={**kept, "HOME": str(home), **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
        )
        made = work / "made.txt"
        said = LAST in done.stdout
        wrote = made.read_text().strip() if made.exists() else None
        good = done.returncode == 0 and said and wrote == "folio"
        print(f"{name}: {'did it' if good else 'FAILED'} in {time.monotonic() - began:.1f} s", flush=True)
        if not good:
            print(f"status {done.returncode}, made.txt: {wrote!r}, output:\n{done.stdout[-4000:]}", flush=True)
        return good


def main():
    alone()
    binary, modules, *names = sys.argv[1:]
    log = []
    server, url = serve(Path(binary).resolve(), log)
    try:
        results = [run(name, Path(modules).resolve(), url) for name in names or AGENTS]
    finally:
        server.terminate()
        server.wait(20)
    if not all(results):
        print("the server said:\n" + "".join(log)[-4000:])
    sys.exit(0 if all(results) else 1)


main()
