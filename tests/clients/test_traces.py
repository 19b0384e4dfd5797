"""Spans of requests, as OpenTelemetry's own messages read them."""

import http.server
import threading
import time

import pytest
from folio_server import Server
from openai import OpenAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from test_disk_kv import ask
from test_host_kv import HOST

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.BaseHTTPRequestHandler):
    spans = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for of_scope in of_resource.scope_spans:
                self.spans.extend(of_scope.spans)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    Collector.spans.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def attributes(span):
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in span.attributes}


def test_a_request_is_a_span_of_its_callers_trace(collector):
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    server = Server("--otlp-traces-endpoint", endpoint)
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    ask = lambda **more: client.chat.completions.create(
        model="folio-demo", messages=[{"role": "user", "content": "Who is there?"}], max_tokens=5, **more
    )
    answer = ask(extra_headers=headers)
    ask(extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    ask()
    deadline = time.monotonic() + 30
    while len({bytes(span.trace_id) for span in Collector.spans}) < 2:
        assert time.monotonic() < deadline, Collector.spans
        time.sleep(0.1)
    assert server.stop() == 0

    own = [span for span in Collector.spans if span.trace_id.hex() == TRACE]
    (whole,) = (span for span in own if span.parent_span_id.hex() == PARENT)
    # What its caller does not record is not told of.
    assert sorted(span.name for span in own) == ["chat folio-demo", "decode", "prefill", "queue"]
    assert whole.trace_state == "vendor=1" and whole.kind == whole.SPAN_KIND_SERVER
    told = attributes(whole)
    assert told["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert told["gen_ai.request.max_tokens"] == 5 and told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    phases = sorted((span for span in own if span is not whole), key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    for before, after in zip(phases, phases[1:]):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert all(span.parent_span_id == whole.span_id for span in phases)
    assert abs(whole.end_time_unix_nano / 1e9 - time.time()) < 60
    (other,) = (span for span in Collector.spans if span.name == "chat folio-demo" and span.trace_id.hex() != TRACE)
    assert not other.parent_span_id


def test_loads_and_preemptions_are_spans(collector):
    """A cache with room for three prompts, and memory beside it; two answers that outgrow the cache together."""
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    server = Server("--otlp-traces-endpoint", endpoint, *HOST, "--speculate", "off")
    for number in [*range(8), 0, 1]:
        ask(server, number)
    end = time.monotonic() + 60
    while not server.metric("folio:preemptions_total", mode="tier") + server.metric("folio:preemptions_total", mode="recompute"):
        assert time.monotonic() < end, server.get("/metrics")
        both = [threading.Thread(target=ask, args=(server, number, "none", 400)) for number in range(2)]
        [thread.start() for thread in both]
        [thread.join() for thread in both]
    assert server.stop() == 0
    wholes = {span.span_id: span for span in Collector.spans if span.name == "text_completion folio-demo"}
    for name in ("tier_load", "preempted"):
        found = [span for span in Collector.spans if span.name == name]
        assert found, name
        for span in found:
            whole = wholes[span.parent_span_id]
            assert span.trace_id == whole.trace_id and span.start_time_unix_nano <= span.end_time_unix_nano
            assert whole.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= whole.end_time_unix_nano
    loads = [attributes(span) for span in Collector.spans if span.name == "tier_load"]
    assert all(load == {"folio.tier": "host", "folio.verified": True} for load in loads), loads


def test_a_collector_that_is_not_there_is_only_counted():
    server = Server("--otlp-traces-endpoint", "http://127.0.0.1:9")
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    client.completions.create(model="folio-demo", prompt="Once", max_tokens=3)
    deadline = time.monotonic() + 30
    while not server.metric("folio:traced_requests_total", result="failed"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.stop() == 0
