"""Load generators against millrace-agent: vLLM's benchmark and guidellm, sixteen requests of sixteen tokens each."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

URL, MODEL = os.environ["MILLRACE_URL"], os.environ["MILLRACE_MODEL"]
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "models" / MODEL
REQUESTS, TOKENS, IN_FLIGHT = 16, 16, 4
LIMIT_S = 180


def ran(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_vllm_bench_serve(tmp_path: Path, endpoint: str) -> None:
    backend = "openai-chat" if endpoint.startswith("chat") else "openai"
    ran(
        *(os.environ["MILLRACE_PYTHON"], ROOT / "examples" / "vllm_bench.py"),
        *("--base-url", URL, "--backend", backend, "--endpoint", f"/v1/{endpoint}"),
        *("--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", 32),
        *("--random-output-len", TOKENS, "--ignore-eos", "--num-prompts", REQUESTS, "--max-concurrency", IN_FLIGHT),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"),
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (REQUESTS, REQUESTS * TOKENS)
    assert result["median_ttft_ms"] > 0
    assert result["median_itl_ms"] > 0


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_guidellm(tmp_path: Path, endpoint: str) -> None:
    report = tmp_path / "report.json"
    ran(
        *(os.environ["MILLRACE_GUIDELLM_PYTHON"], "-m", "guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={URL},model={MODEL},request_format=/v1/{endpoint}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
        *("--profile", f"kind=concurrent,streams={IN_FLIGHT}", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * TOKENS
    assert metrics["time_to_first_token_ms"]["successful"]["median"] > 0
