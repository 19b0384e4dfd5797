"""Frameworks and tools for Python do the agents' task against the real server around a scripted model; what is not installed is skipped.

    python tests/clients/agents/sdks.py target/debug/examples/scripted [--keep]

Packages: openai-agents, pydantic-ai-slim[openai,anthropic], llm, llama-index-llms-openai-like; aider-chat in an environment of its own.
With --keep the versions and what was seen are written to results/, to a file of that day; no earlier run's is written over.
"""

import asyncio
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from kept import keep

TASK = "Make a file made.txt with the word folio"
LAST = "Done: it is there."
HERE = Path(__file__).resolve().parent


def write_file(path: str, text: str) -> str:
    """Writes a text to a file."""
    Path(path).write_text(text)
    return "written"


def agents_sdk_responses(url):
    return agents_sdk(url, "OpenAIResponsesModel")


def agents_sdk_chat(url):
    return agents_sdk(url, "OpenAIChatCompletionsModel")


def agents_sdk(url, model):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none")
    agent = agents.Agent(
        name="writer", instructions="Use the tool.", tools=[agents.function_tool(write_file)],
        model=getattr(agents, model)(model="folio", openai_client=client),
    )
    return asyncio.run(agents.Runner.run(agent, TASK)).final_output


def pydantic_ai_openai(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("folio", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    return Agent(model, tools=[write_file]).run_sync(TASK).output


def pydantic_ai_anthropic(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel("folio", provider=AnthropicProvider(base_url=url, api_key="none"))
    return Agent(model, tools=[write_file]).run_sync(TASK).output


def llm_cli(url):
    home = Path("llm")
    home.mkdir()
    model = f"- model_id: folio\n  model_name: folio\n  api_base: {url}/v1\n  supports_tools: true\n"
    (home / "extra-openai-models.yaml").write_text(model)
    Path("tool.py").write_text("def write_file(path: str, text: str) -> str:\n    'Writes a text to a file.'\n    open(path, 'w').write(text)\n    return 'written'\n")
    environment = {**os.environ, "LLM_USER_PATH": str(home.resolve()), "OPENAI_API_KEY": "none"}
    command = [Path(sys.executable).parent / "llm", "-m", "folio", "--functions", "tool.py", TASK]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def llama_index(url):
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(model="folio", api_base=url + "/v1", api_key="none", is_chat_model=True, is_function_calling_model=True)
    answer = llm.predict_and_call([FunctionTool.from_defaults(write_file)], user_msg=TASK)
    assert str(answer) == "written", answer
    return LAST


def aider(url):
    subprocess.run(["git", "init", "-q", "."], check=True)
    environment = {**os.environ, "OPENAI_API_BASE": url + "/v1", "OPENAI_API_KEY": "none", "HOME": os.getcwd()}
    command = [
        Path(sys.executable).parent / "aider", "--model", "openai/folio", "--edit-format", "diff", "--yes-always", "--no-auto-commits",
        "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-gitignore", "--message", TASK,
    ]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout


CLIENTS = {
    "openai-agents, responses": ("openai-agents", agents_sdk_responses),
    "openai-agents, chat completions": ("openai-agents", agents_sdk_chat),
    "pydantic-ai, chat completions": ("pydantic-ai-slim", pydantic_ai_openai),
    "pydantic-ai, messages": ("pydantic-ai-slim", pydantic_ai_anthropic),
    "llm": ("llm", llm_cli),
    "llama-index": ("llama-index-llms-openai-like", llama_index),
    "aider": ("aider-chat", aider),
}


def main():
    binary = Path(sys.argv[1]).resolve()
    server = subprocess.Popen([binary, "0", HERE / "script.json"], stderr=subprocess.PIPE, text=True)
    url = next(found[1] for line in server.stderr if (found := re.search(r"listening on (\S+)", line)))
    results, start = {}, os.getcwd()
    try:
        for name, (package, run) in CLIENTS.items():
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                try:
                    said = run(url)
                    wrote = Path("made.txt").read_text().strip()
                    seen = "did it" if LAST in said and wrote == "folio" else f"said {said!r}, wrote {wrote!r}"
                except Exception as error:
                    traceback.print_exc()
                    seen = f"{type(error).__name__}: {error}"
                finally:
                    os.chdir(start)
            results[name] = {"package": package, "version": version, "seen": seen}
            print(f"{name} {version}: {seen}", flush=True)
    finally:
        server.terminate()
    if "--keep" in sys.argv[2:]:
        keep("sdks", results)
    sys.exit(any(result["seen"] != "did it" for result in results.values()))


main()
