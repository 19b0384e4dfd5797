"""lm-evaluation-harness and guidellm against a server, without a network: a task of six lines is scored and answered, and a load is run.

    python tests/clients/agents/evals.py target/release/folio [--keep]

Packages: lm_eval[api], guidellm. Serves the built-in model. With --keep the versions and what was seen are written to results/, to a file of that day; no earlier run's is written over.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kept import keep

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "crates/folio/assets/demo"
TASK = """task: folio_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: {kind}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list:\n  - metric: acc'
ANSWER = 'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 8\nmetric_list:\n  - metric: exact_match'


def tool(name):
    return str(Path(sys.executable).with_name(name))


def lm_eval(url):
    """Which of two words goes on, by log probabilities of given tokens; and answers with a stop string."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.jsonl")
        who = "fox dog cat cow owl bee".split()
        lines = [{"question": f"Once upon a time there was a {one} who lived in the", "choices": [" woods", " seven"], "answer": 0} for one in who]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, kind, more in (("choice", "multiple_choice", CHOICE), ("answer", "generate_until", ANSWER)):
            Path(folder, f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, data=data, more=more))
        model = f"model=folio-demo,base_url={url}/v1/completions,tokenizer={MODEL},num_concurrent=2,max_retries=1,max_length=2048"
        run = subprocess.run(
            [tool("lm_eval"), "--model", "local-completions", "--model_args", model, "--tasks", "folio_choice,folio_answer", "--include_path", folder],
            capture_output=True, text=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    table = re.findall(r"\|folio_(\w+)\s*\|.*?\|(acc|exact_match)\s*\|.\s*\|\s*([\d.]+)\|", run.stdout)
    assert run.returncode == 0 and len(table) == 2, run.stdout + run.stderr
    assert dict((name, value) for name, _, value in table)["choice"] == "1", run.stdout
    return "scored and answered"


def guidellm(url):
    run = subprocess.run(
        [tool("guidellm"), "run", "--backend", f"kind=openai_http,target={url}", "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=8",
         "--tokenizer", f"kind=huggingface_auto,model={MODEL}", "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--output", "kind=console",
         "--disable-progress"],
        capture_output=True, text=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"})
    assert run.returncode == 0 and "16.0" in run.stdout and "Benchmarking complete" in run.stdout, run.stdout + run.stderr
    return "load of eight requests"


def main():
    server = subprocess.Popen([sys.argv[1], "serve", "--port", "0", "--device", "cpu"], stderr=subprocess.PIPE, text=True)
    try:
        url = next(found[1] for line in server.stderr if (found := re.search(r"listening on (http://\S+)", line)))
        seen = {}
        for name, package, run in (("lm-evaluation-harness", "lm_eval", lm_eval), ("guidellm", "guidellm", guidellm)):
            seen[name] = {"package": package, "version": importlib.metadata.version(package), "seen": run(url)}
            print(name, seen[name])
    finally:
        server.terminate()
    if "--keep" in sys.argv[2:]:
        keep("evals", seen)


main()
