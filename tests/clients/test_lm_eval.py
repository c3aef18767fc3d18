"""EleutherAI's lm-evaluation-harness scores exported models as Instar does, offline."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from exported import NEW_TOKENS, PROMPTS, TEXT, Exported, offline

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

HARNESS = Path(__file__).parents[2] / ".venv-clients/bin/python"
LINES = TEXT.splitlines(keepends=True)
DOCUMENTS = [*LINES[40:44], "".join(LINES[100:140])]
"""the last is longer than a context"""
QUESTIONS = [("12 squared is", ["144,", "12,", "1728."]), ("9 cubed is", ["81.", "729.", "9."])]
TASKS = {
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "completion": f"""
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: ""
generation_kwargs: {{until: [], max_gen_toks: {NEW_TOKENS}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}
ROWS = {
    "rolling": [{"text": text} for text in DOCUMENTS],
    "choice": [{"question": question, "choices": choices} for question, choices in QUESTIONS],
    "completion": [{"prompt": prompt} for prompt in PROMPTS],
}


def test_its_scores_are_those_of_instar(model: Exported, tmp_path: Path) -> None:
    scores = evaluate(model.folder, tmp_path)
    exact = [model.log_likelihood(text) for text in DOCUMENTS]
    assert [float(likelihood) for (likelihood,) in scores["rolling"]] == pytest.approx(
        exact, rel=1e-5
    )
    bits = -sum(exact) / sum(len(text.encode()) for text in DOCUMENTS) / math.log(2)
    results = json.loads(next(tmp_path.glob("out/*/results_*.json")).read_text())["results"]
    assert results["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert 0 < bits < 4
    for (question, choices), answers in zip(QUESTIONS, scores["choice"], strict=True):
        exact = [model.log_likelihood(f" {choice}", question) for choice in choices]
        assert [float(score) for score, _ in answers] == pytest.approx(exact, rel=1e-5)
    texts = [model.tokenizer.decode(model.continuation(prompt)) for prompt in PROMPTS]
    assert [text for (text,) in scores["completion"]] == texts


def evaluate(folder: Path, place: Path) -> dict[str, list[list[object]]]:
    """What the harness computed for each row of each task."""
    for name, task in TASKS.items():
        data = place / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[name]))
        where = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        where += f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (place / f"{name}.yaml").write_text(where + task)
    model = f"pretrained={folder},dtype=float32"
    words = ["run", "--model", "hf", "--model_args", model, "--device", "cpu", "--tasks", *TASKS]
    words += ["--include_path", str(place), "--output_path", str(place / "out"), "--log_samples"]
    process = subprocess.run(
        [HARNESS, "-m", "lm_eval", *words],
        env=offline() | {"HF_HOME": str(place / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    responses = {}
    for name in TASKS:
        (file,) = place.glob(f"out/*/samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        responses[name] = [row["filtered_resps"] for row in rows]
    return responses
