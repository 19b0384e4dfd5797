"""schemathesis against a real server: no 5xx, and every response as the served document says (status, content type, schema).

Only the standard library, and the `schemathesis` command on PATH. Bounded: the generated requests are few per operation, and
the built-in model answers them in some 20 seconds.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from folio_server import Server  # noqa: E402

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SECONDS = 180


def main():
    server = Server()
    try:
        document = json.loads(server.get("/openapi.json"))
        assert document["openapi"].startswith("3.1") and len(document["paths"]) > 30, document["info"]
        command = ["schemathesis", "run", server.url + "/openapi.json", "--checks", CHECKS, "--no-color"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1"]
        command += ["--request-timeout", "60", "--suppress-health-check", "all", "--generation-database", "none"]
        # That one goes on until its reader leaves.
        command += ["--exclude-path", "/v1/why/live"]
        # It leaves notes where it runs.
        with tempfile.TemporaryDirectory() as folder:
            status = subprocess.run(command, cwd=folder, timeout=SECONDS).returncode
        server.wait_idle()
        return status
    finally:
        assert server.stop() == 0, "".join(server.log)


if __name__ == "__main__":
    sys.exit(main())
