"""vLLM for CPUs generates from exported models what Instar does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from exported import NEW_TOKENS, PROMPTS, Exported, offline

VLLM = Path(__file__).parents[2] / ".venv-vllm/bin/python"
ON_CPU = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
GENERATE = f"""\
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, prompts, output = sys.argv[1:]
    llm = LLM(folder, dtype="float32", enforce_eager=True)
    greedy = SamplingParams(temperature=0, max_tokens={NEW_TOKENS}, ignore_eos=True)
    found = [each.outputs[0] for each in llm.generate(json.loads(prompts), greedy)]
    with open(output, "w") as file:
        json.dump([[list(each.token_ids), each.text] for each in found], file)
"""


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_it_generates_the_same_tokens_and_text(model: Exported, tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(GENERATE)
    words = ["generate.py", str(model.folder), json.dumps(PROMPTS), "found.json"]
    process = subprocess.run(
        [VLLM, *words],
        cwd=tmp_path,
        env=offline() | ON_CPU,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    same = [model.continuation(prompt) for prompt in PROMPTS]
    expected = [[ids, model.tokenizer.decode(ids)] for ids in same]
    assert json.loads((tmp_path / "found.json").read_text()) == expected
