"""What an operator who lets strangers in meets: keys, limits, records, TLS, the second listener, one configuration file."""

import csv
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request

import openai
import pytest
import trustme

from conftest import client_of

BINARY = os.environ.get("FOLIO_BIN", "folio")


def folio(*args, fails=False):
    done = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout.strip()


def ask(url, key=None, method="GET", context=None):
    """(status, body)"""
    request = urllib.request.Request(url, method=method, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def say(client, **extra):
    return client.completions.create(model="folio", prompt="Once upon a time", max_tokens=4, **extra)


@pytest.fixture
def settings(tmp_path):
    """A configuration file with everything, and a key of its tenant."""
    keys = tmp_path / "keys.redb"
    key = folio("keys", "create", "--keys", keys, "--tenant", "acme", "--name", "ci")
    file = tmp_path / "folio.toml"
    file.write_text(f"""
model = "demo"
served-model-name = ["folio"]
keys = "{keys}"
usage = "{tmp_path}/usage.redb"
audit-log = "{tmp_path}/audit.jsonl"
admin-listen = "127.0.0.1:0"
admin_key = ["operator-secret"]

[[tenants]]
name = "acme"
limits = {{ requests_per_minute = 30, tokens_per_minute = 100000 }}
""")
    return tmp_path, file, keys, key


def test_a_configuration_file_is_checked_and_served(serve, settings, monkeypatch):
    # Whatever can be logged is.
    monkeypatch.setenv("FOLIO_LOG", "trace")
    folder, file, keys, key = settings
    shown = folio("config", "check", file)
    assert "is fine" in shown and "1 tenant" in shown and "operator-secret" not in shown
    server = serve("--config", str(file))
    client = client_of(server, key)
    answer = say(client)
    with pytest.raises(openai.AuthenticationError):
        say(client_of(server, "wrong"))

    rows = ask(server.url + "/v1/usage/records?format=csv", key)[1]
    row = next(csv.DictReader(rows.splitlines()))
    assert (row["tenant"], row["model"], row["requests"]) == ("acme", "folio", "1")
    assert row["key"] in folio("keys", "list", "--keys", keys)
    assert int(row["prompt_tokens"]) == answer.usage.prompt_tokens
    assert int(row["completion_tokens"]) == answer.usage.completion_tokens

    # A second key while the server runs; then no key of the two is left.
    second = folio("keys", "create", "--keys", keys, "--tenant", "acme", "--scope", "generate", "--expires", "1h")
    say(client_of(server, second))
    assert ask(server.url + "/v1/usage", second)[0] == 403
    folio("keys", "revoke", "--keys", keys, row["key"])
    with pytest.raises(openai.AuthenticationError, match="revoked"):
        say(client)
    assert folio("keys", "revoke", "--keys", keys, second).startswith("revoked")
    with pytest.raises(openai.AuthenticationError, match="revoked"):
        say(client_of(server, second))

    # Operators have a listener of their own.
    assert ask(server.admin + "/reset_prefix_cache", method="POST")[0] == 401
    status, body = ask(server.admin + "/reset_prefix_cache", "operator-secret", method="POST")
    assert status == 200 and json.loads(body)["freed_blocks"] > 0
    assert ask(server.url + "/reset_prefix_cache", key, method="POST")[0] in (401, 404)
    assert json.loads(ask(server.admin + "/v1/usage/records", "operator-secret")[1])["data"][0]["tenant"] == "acme"

    assert server.stop() == 0
    audit = (folder / "audit.jsonl").read_text()
    secrets = [key, second, key.rsplit("-", 1)[1], "operator-secret", "Once upon"]
    assert "answered" in "".join(server.log)
    for place in (audit, "".join(server.log)):
        assert not any(secret in place for secret in secrets)
    events = [json.loads(line) for line in audit.splitlines()]
    assert sum(event["event"] == "generation" for event in events) == 2

    # Records outlive the server.
    again = serve("--config", str(file))
    third = folio("keys", "create", "--keys", keys, "--tenant", "acme")
    rows = json.loads(ask(again.url + "/v1/usage/records?group_by=model", third)[1])["data"]
    assert [row["requests"] for row in rows] == [2]


def test_limits_are_told_in_headers_and_in_a_429(serve, tmp_path):
    file = tmp_path / "tenants.json"
    limits = {"requests_per_minute": 2, "tokens_per_minute": 5000}
    file.write_text(json.dumps({"tenants": [{"name": "a", "keys": ["k"], "limits": limits}]}))
    server = serve("--tenants", str(file))
    client = client_of(server, "k")
    raw = client.completions.with_raw_response.create(model="folio-demo", prompt="Once", max_tokens=2)
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    assert raw.headers["x-ratelimit-limit-tokens"] == "5000"
    client.completions.create(model="folio-demo", prompt="Once", max_tokens=2)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="folio-demo", prompt="Once", max_tokens=2)
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30


def test_https_and_a_renewed_certificate(serve, tmp_path):
    authority = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue():
        issued = authority.issue_cert("127.0.0.1")
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return issued.cert_chain_pems[0].bytes().decode()

    first = issue()
    server = serve("--tls-cert", str(cert), "--tls-key", str(key))
    assert server.url.startswith("https://")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    assert ask(server.url + "/health", context=trusting)[0] == 200
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(server.url + "/health", context=ssl.create_default_context())
    with pytest.raises(Exception):
        ask(server.url.replace("https", "http") + "/health")
    # A stream over TLS, with the SDK.
    http = openai.DefaultHttpxClient(verify=trusting)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", http_client=http, max_retries=0) as client:
        model = client.models.list().data[0].id
        stream = client.completions.create(model=model, prompt="Once", max_tokens=8, stream=True)
        assert sum(len(chunk.choices[0].text) for chunk in stream) > 0

    second = issue()
    address = server.url.removeprefix("https://").split(":")
    deadline = time.monotonic() + 30
    while ssl.get_server_certificate((address[0], int(address[1]))).split() != second.split():
        assert time.monotonic() < deadline, "the renewed certificate is not served"
        time.sleep(0.5)
    assert first.split() != second.split()
    assert ask(server.url + "/health", context=trusting)[0] == 200
    cert.write_text("rubbish")
    time.sleep(6)
    assert ask(server.url + "/health", context=trusting)[0] == 200, "the last good one stays"


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--host", "0.0.0.0"], "--allow-unauthenticated"),
        (["--admin-key", "k"], "--admin-listen"),
        (["--admin-listen", "0.0.0.0:0", "--api-key", "k"], "--admin-key"),
        (["--tls-cert", "cert.pem"], "--tls-key"),
        (["--tls-cert", "/dev/null", "--tls-key", "/dev/null"], "/dev/null"),
        (["--keys", "/nowhere/keys.redb"], "folio keys create"),
        (["--usage", "/nowhere/usage.redb"], "/nowhere/usage.redb"),
        (["--audit-log", "/nowhere/audit.log"], "/nowhere/audit.log"),
        (["--metrics-on-admin"], "--admin-listen"),
        (["--config", "/nowhere/folio.toml"], "/nowhere/folio.toml"),
    ],
)
def test_what_cannot_be_is_refused_at_start_and_named(arguments, named):
    assert named in folio("serve", "--port", "0", *arguments, fails=True)


def test_mistakes_in_a_configuration_file_are_named(tmp_path):
    file = tmp_path / "folio.toml"
    for text, named in [
        ("prot = 1", "--port"),
        ("port = 70000", "port"),
        ("[[tenants]]\nname = 'a'\nkey = 'k'", "key"),
        ("[[tenants]]\nname = 'a'", "keys"),
        ("[[tenants]]\nname = 'a'\nkeys = ['k', 'k']", "twice"),
        ("[limits]\nx = 1", "limits"),
        ("port = ", "line 1"),
    ]:
        file.write_text(text)
        assert named in folio("config", "check", file, fails=True), text
