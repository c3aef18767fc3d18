"""Models for other programs to run: exported by runs that grew, and one grown further in transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from instar.data.text.tokenizer import Tokenizer, load_saved_tokenizer
from instar.growth import grow
from instar.models.gpt import GPT, load_gpt
from instar.models.sampling import SamplingOptions, generate

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
CONFIG = """\
name: {preset}
preset: {preset}
model: {{n_layer: 2, n_head: 2, n_embd: 64, n_mlp: 96, context: 64}}
data: {{source: squares.txt, tokenizer: bpe, vocab_size: 320}}
train: {{until: 60it, batch_size: 8}}
optimizer: {{lr: 3e-3}}
learning_rate: {{warmup_iters: 5}}
schedule:
  - {{name: widen_mlp, value: 128, max_wait_iters: 20}}
  - {{name: insert_layers, value: 1, max_wait_iters: 20}}
record: {{sample_tokens: 0, report: false}}
"""
PROMPTS = ("12 squared is", "7 cubed", "\n200 squared is 40000, and 200", "and")
NEW_TOKENS = 12


@dataclass(frozen=True)
class Exported:
    """A folder that other programs load, and Instar's model that computes the same."""

    folder: Path
    model: GPT
    tokenizer: Tokenizer

    def continuation(self, prompt: str) -> list[int]:
        """The most likely next tokens of a prompt."""
        ids = self.tokenizer.encode(prompt)
        tokens_BT = torch.tensor([ids.tolist()])
        grown_BT = generate(self.model, tokens_BT, NEW_TOKENS, SamplingOptions(temperature=0.0))
        return [int(token) for token in grown_BT[0, len(ids) :]]

    def log_likelihood(self, text: str, prompt: str = "") -> float:
        """ln p(`text`) after `prompt`, or after the end token, in full windows of the model's context
        and a last one that overlaps the one before."""
        ids = self.tokenizer.encode(prompt + text).tolist()
        tokens = torch.tensor(ids if prompt else [self.tokenizer.end_id, *ids])
        context, total = self.model.arch.context, 0.0
        for start in range(len(self.tokenizer.encode(prompt)) or 1, len(tokens), context):
            end = min(start + context, len(tokens))
            window = tokens[max(0, end - context - 1) : end]
            with torch.no_grad():
                logits_TV = self.model(window[None, :-1])[0]
            lost_T = F.cross_entropy(logits_TV, window[1:], reduction="none")
            total -= float(lost_T[start - end :].double().sum())
        return total


def run_instar(place: Path, *words: str) -> None:
    command = [sys.executable, "-m", "instar", *words]
    result = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def export_all(place: Path) -> dict[str, Exported]:
    """Of runs in the styles of GPT-2 and Llama, and the latter after more growth in transformers' class,
    which keeps what it computes."""
    (place / "squares.txt").write_text(TEXT)
    exports = {}
    for preset in ("gpt2", "llama"):
        (place / "run.yaml").write_text(CONFIG.format(preset=preset))
        run_instar(place, "train", "run.yaml", "--set", f"record.run_dir={preset}-run")
        run_instar(place, "checkpoint", "export", f"{preset}-run", preset, "--to", "hf")
        run = place / f"{preset}-run"
        model = load_gpt(run / "checkpoints" / "step-60")
        assert model.arch.n_layer == 3
        exports[preset] = Exported(place / preset, model, load_saved_tokenizer(run))
    model = AutoModelForCausalLM.from_pretrained(place / "llama")
    for name, value in {"widen_mlp": "x2", "widen_hidden": "x2", "insert_layers": 1}.items():
        grow(model, name, value)
    model.save_pretrained(place / "grown")
    AutoTokenizer.from_pretrained(place / "llama").save_pretrained(place / "grown")
    llama = exports["llama"]
    return exports | {"grown": Exported(place / "grown", llama.model, llama.tokenizer)}


def offline() -> dict[str, str]:
    """The environment of a client that reaches no hub."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
