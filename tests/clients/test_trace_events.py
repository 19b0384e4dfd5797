"""A recording of a server under load, held to what Perfetto's importer of Chrome's trace events needs."""

import collections
import concurrent.futures
import json
import os
import subprocess

NAMES = {"process_name", "thread_name"}


def check(trace):
    """Fails where Perfetto would drop or misplace an event. Returns how many slices each track has."""
    named, used, slices, flows = set(), set(), collections.defaultdict(list), collections.defaultdict(list)
    for event in trace["traceEvents"]:
        phase, track = event["ph"], (event["pid"], event["tid"])
        assert isinstance(event["name"], str) and all(type(number) is int for number in track), event
        if phase == "M":
            assert event["name"] in NAMES and isinstance(event["args"]["name"], str), event
            named.add((event["name"], track if event["name"] == "thread_name" else track[0]))
            continue
        assert type(event["ts"]) is int and event["ts"] >= 0, event
        if phase == "X":
            assert type(event["dur"]) is int and event["dur"] >= 0, event
            slices[track].append((event["ts"], event["ts"] + event["dur"], event["name"]))
            used |= {("process_name", track[0]), ("thread_name", track)}
        elif phase == "C":
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values()), event
            used.add(("process_name", track[0]))
        else:
            assert phase in "sf", f"a phase that is not looked at here: {event}"
            flows[event["cat"], event["id"]].append(phase)
    assert used <= named, f"without a name: {used - named}"
    assert all(sorted(ends) == ["f", "s"] for ends in flows.values()), flows
    # Slices of one track are within each other or apart: of two that overlap otherwise the later is dropped. Those that begin together
    # are read in the order of the file, the outer one first.
    for track, of in slices.items():
        around = []
        for begin, end, name in sorted(of, key=lambda slice: slice[0]):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], f"{name} of {track} overlaps what is around it"
            around.append(end)
    return {track: len(of) for track, of in slices.items()}


def test_a_recording_opens_in_perfetto(server, client, model, tmp_path):
    file = tmp_path / "trace.json"
    command = [os.environ["FOLIO_BIN"], "trace", "record", "--url", server.url, "--seconds", "1", "--out", str(file)]
    recording = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def ask(seed):
        asked = 0
        while recording.poll() is None and asked < 500:
            prompt = "Once upon a time " * (1 + seed + asked % 3)
            client.completions.create(model=model, prompt=prompt, max_tokens=4 + seed, seed=seed)
            asked += 1
        return asked

    with concurrent.futures.ThreadPoolExecutor() as threads:
        asked = sum(threads.map(ask, range(4)))
    said = recording.communicate(timeout=60)[1]
    assert recording.returncode == 0, said
    trace = json.loads(file.read_text())
    tracks = check(trace)
    recorded = trace["otherData"]["requests"]
    assert 0 < recorded <= asked and len(tracks) == recorded + 1, tracks
    steps = max(tracks)
    assert all(count == 4 for track, count in tracks.items() if track != steps), "the request, and queue, prefill and decode within it"
