"""Config files as people get them wrong, each a good one with one thing in it changed."""

from __future__ import annotations

from typing import NamedTuple

from instar.extensions import built_in

LANGUAGE = """\
# A small GPT on a folder of text.
name: books
preset: llama
seed: 1
device: cpu

model:
  n_layer: 6
  n_head: 6
  n_embd: 384
  context: 256
  dropout: 0.1

data:
  source: books.txt
  tokenizer: char

train:
  until: [5000it, 2h]
  batch_size: 32
  gradient_accumulation_steps: 4
  clip: 1.0

optimizer:
  name: adamw
  lr: 1e-3
  weight_decay: 0.1

learning_rate:
  shape: cosine
  warmup_iters: 100
  lr_decay_iters: 5000

eval:
  eval_interval: 250

checkpoint:
  every_minutes: 10
  on_best: true

parallel:
  backend: gloo
  ddp:
    bucket_cap_mb: 50

schedule:
  - name: change_lr
    value: 0.5
    trigger_loss: 3.0
    max_wait_iters: 1000
  - name: widen_mlp
    value: 2048
    when:
      any:
        - loss_below: 2.5
        - at_step: 3000
    reevaluate: true
"""

COURSE = """\
learning_rate:
  shape: cosine
  warmup_iters: 100
  lr_decay_iters: 5000
"""

MIXTURE = """\
name: mixed
data:
  kind: rows
  tokenizer: byte
  mixture:
    - source: web.jsonl
      weight: 3
    - source: code.jsonl
      weight: 1
      text_field: content
  workers: 2
train: {until: 2000it, batch_size: 8}
"""

GRAPH = """\
name: causal
task: graph

model:
  layer: gat
  n_layer: 3
  width: 64
  n_head: 4
  pooling: [mean, max]
  heads:
    - name: manifold
      kind: classification
      classes: 2
    - name: ordering_fraction
      kind: regression
      weight: 10

data:
  source: causal_sets
  causal_sets:
    sets: 2000
    dimensions: [2, 3]
    min_points: 32
    max_points: 64
  val: 0.1
  test: 0.1

train:
  until: 10ep
  batch_size: 32

early_stopping:
  rules:
    - metric: manifold/accuracy
      patience: 5

checkpoint:
  best_of: [manifold/accuracy]
"""

SCHEDULED = "name: grown\ntrain: {until: 4000it}\nschedule: grow.yaml\n"

OPERATIONS = """\
- name: change_batch_size
  value: 2.0
  trigger_loss: 6.0
  max_wait_iters: 100
- name: insert_layers
  value: 2
  trigger_loss: 4.2
  max_wait_iters: 100
"""

GOOD = {
    "language.yaml": LANGUAGE,
    "mixture.yaml": MIXTURE,
    "graph.yaml": GRAPH,
    "grow.yaml": OPERATIONS,
    "scheduled.yaml": SCHEDULED,
}


class Broken(NamedTuple):
    """`old` of a good file made `new`.

    The message must name the line on which the file first differs, or `line` (0: the file as a
    whole), and say `suggests`; None: nobody can know what was meant.
    """

    base: str
    old: str
    new: str
    suggests: str | None
    line: int | None = None

    def text(self) -> str:
        good = GOOD[self.base]
        if not self.old:
            return self.new
        assert good.count(self.old) == 1, self.old
        return good.replace(self.old, self.new)

    def expected_line(self) -> int:
        if self.line is not None:
            return self.line
        pairs = zip(GOOD[self.base].split("\n"), self.text().split("\n"), strict=False)
        return next(number for number, (a, b) in enumerate(pairs, 1) if a != b)


MERGED = """\
    - &web {source: web.jsonl, wieght: 3}
    - {<<: *web, source: more.jsonl}
"""

L, M, G, S = "language.yaml", "mixture.yaml", "graph.yaml", "grow.yaml"

CONFIGS = {
    # keys misspelt, at every depth
    "section": Broken(L, "optimizer:", "optimiser:", "optimizer"),
    "section without its end": Broken(L, "learning_rate:", "learning_rat:", "learning_rate"),
    "key": Broken(L, "n_embd: 384", "n_emdb: 384", "n_embd"),
    "key in the plural": Broken(L, "n_layer: 6", "n_layers: 6", "n_layer"),
    "key with a hyphen": Broken(L, "batch_size: 32", "batch-size: 32", "batch_size"),
    "key in camel case": Broken(L, "weight_decay: 0.1", "weightDecay: 0.1", "weight_decay"),
    "long key": Broken(L, "gradient_accumulation_steps", "gradient_acumulation_step", "gradient_accumulation_steps"),
    "key at depth three": Broken(L, "bucket_cap_mb", "bucket_cap", "bucket_cap_mb"),
    "key of an operation": Broken(L, "max_wait_iters", "max_wait_iter", "max_wait_iters"),
    "trigger": Broken(L, "at_step: 3000", "at_steps: 3000", "at_step"),
    "trigger in the wrong words": Broken(L, "loss_below: 2.5", "trigger_loss: 2.5", "loss_below"),
    "operation": Broken(L, "name: widen_mlp", "name: widden_mlp", "widen_mlp"),
    "part of a mixture": Broken(M, "weight: 3", "wieght: 3", "weight"),
    "field of a part": Broken(M, "text_field: content", "field: content", "text_field"),
    "key of a head": Broken(G, "classes: 2", "n_classes: 2", "classes"),
    "key of generated data": Broken(G, "min_points: 32", "minimum_points: 32", "min_points"),
    "rule of stopping": Broken(G, "patience: 5", "patiance: 5", "patience"),
    "key in a schedule's file": Broken(S, "trigger_loss: 4.2", "triger_loss: 4.2", "trigger_loss"),
    # keys in the wrong section
    "rate under train": Broken(L, "  clip: 1.0\n", "  clip: 1.0\n  lr: 1e-3\n", "optimizer"),
    "warm-up under optimizer": Broken(L, "  weight_decay: 0.1\n", "  warmup_iters: 100\n", "learning_rate"),
    "budget at the top": Broken(L, "device: cpu", "until: 5000it", "train"),
    "layers under train": Broken(L, "  clip: 1.0\n", "  n_layer: 6\n", "model"),
    "seed under train": Broken(L, "  clip: 1.0\n", "  seed: 3\n", "at the top level"),
    "saving under train": Broken(L, "  clip: 1.0\n", "  save_every: 500\n", "every_steps"),
    "heads under data": Broken(G, "  val: 0.1\n", "  heads: []\n", "model"),
    # what other tools call it
    "rate as a number": Broken(L, COURSE, "learning_rate: 3e-4\n", "optimizer.lr"),
    "Hugging Face's batch": Broken(L, "  batch_size: 32", "  per_device_train_batch_size: 32", "batch_size"),
    "Hugging Face's epochs": Broken(L, "  clip: 1.0\n", "  num_train_epochs: 3\n", "until"),
    "number of epochs": Broken(G, "  until: 10ep", "  num_epochs: 10", "until"),
    "most steps": Broken(L, "  until: [5000it, 2h]", "  max_steps: 5000", "until"),
    "width as in papers": Broken(L, "n_embd: 384", "d_model: 384", "n_embd"),
    "heads as in transformers": Broken(L, "n_head: 6", "num_attention_heads: 6", "n_head"),
    "hidden width of a graph network": Broken(G, "width: 64", "hidden_channels: 64", "width"),
    "nanoGPT's logging": Broken(L, "device: cpu", "wandb_log: true", "record"),
    "logging to W&B": Broken(L, "device: cpu", "wandb: true", "record"),
    "mixed precision": Broken(L, "device: cpu", "fp16: true", "precision"),
    "dtype": Broken(L, "device: cpu", "dtype: bfloat16", "precision"),
    "dtype's value": Broken(L, "device: cpu", "precision: bfloat16", "bf16"),
    "scheduler": Broken(L, "shape: cosine", "lr_scheduler_type: cosine", "shape"),
    "schedule for the rate": Broken(L, "  shape: cosine", "  name: cosine", "shape"),
    "GPUs": Broken(L, "device: cpu", "gpus: 4", "world_size"),
    # values of the wrong type
    "word for a number": Broken(L, "n_layer: 6", "n_layer: six", "a whole number"),
    "number that is none": Broken(L, "lr: 1e-3", "lr: 1e-3x", "a number"),
    "decimal comma": Broken(L, "dropout: 0.1", "dropout: 0,1", "0.1"),
    "quoted number": Broken(L, "batch_size: 32", 'batch_size: "32"', "drop the quotes"),
    "yes": Broken(L, "on_best: true", "on_best: yes", "true"),
    "Python's None": Broken(L, "clip: 1.0", "clip: None", "null"),
    "Python's True": Broken(L, "reevaluate: true", "reevaluate: 1", "true"),
    "list for one": Broken(L, "n_head: 6", "n_head: [6]", "a whole number"),
    "one for a list of parts": Broken(M, "  workers: 2", "  workers: [2]", "a whole number"),
    "share in percent": Broken(G, "  val: 0.1", "  val: 10%", "0.1"),
    "thousands": Broken(L, "lr_decay_iters: 5000", "lr_decay_iters: 5k", "5000"),
    "power": Broken(L, "batch_size: 32", "batch_size: 2**5", "32"),
    "device by number": Broken(L, "device: cpu", "device: 0", "cuda:0"),
    "device by another name": Broken(L, "device: cpu", "device: gpu", "cuda"),
    # amounts and units
    "tokens misspelt": Broken(L, "[5000it, 2h]", "50Mtokens", "50Mtok"),
    "minutes in words": Broken(L, "[5000it, 2h]", "10 minutes", "10min"),
    "steps in words": Broken(L, "[5000it, 2h]", "5000 steps", "5000it"),
    "budget without a unit": Broken(L, "[5000it, 2h]", "5000", "5000it"),
    "epochs in words": Broken(G, "until: 10ep", "until: 10 epochs", "10ep"),
    "minutes as a budget": Broken(L, "every_minutes: 10", "every_minutes: 10min", "10"),
    # values that cannot be
    "optimizer": Broken(L, "name: adamw", "name: adamv", "adamw"),
    "no such preset": Broken(L, "preset: llama", "preset: lama", "llama"),
    "no such task": Broken(G, "task: graph", "task: graphs", "graph"),
    "no such pooling": Broken(G, "pooling: [mean, max]", "pooling: [mean, maximum]", "max"),
    "no such metric": Broken(G, "best_of: [manifold/accuracy]", "best_of: [manifold/acc]", "manifold/accuracy"),
    "negative rate": Broken(L, "lr: 1e-3", "lr: -1e-3", "greater than 0"),
    "dropout of all": Broken(L, "dropout: 0.1", "dropout: 1", "less than 1"),
    "no layer": Broken(L, "n_layer: 6", "n_layer: -1", "at least 0"),
    "one class": Broken(G, "classes: 2", "classes: 1", "at least 2"),
    "dimension that is none": Broken(G, "dimensions: [2, 3]", "dimensions: [2, 5]", "4"),
    "operation's value": Broken(S, "value: 2.0", "value: twice", "a positive number"),
    # keys that do not fit each other
    "heads that do not divide": Broken(L, "n_embd: 384", "n_embd: 400", "402"),
    "graph's heads": Broken(G, "width: 64", "width: 66", "64"),
    "warm-up beyond the end": Broken(L, "warmup_iters: 100", "warmup_iters: 6000", "less than"),
    "class without classes": Broken(G, "      classes: 2\n", "", "classes: 2", 11),
    "weights of some": Broken(M, "      weight: 1\n", "", "weight", 8),
    "bounds the wrong way": Broken(G, "min_points: 32", "min_points: 320", "max_points"),
    "trigger twice": Broken(L, "    reevaluate: true", "    max_wait_iters: 10", "waited", 54),
    "operation without a trigger": Broken(S, "  trigger_loss: 6.0\n  max_wait_iters: 100\n-", "-", "when", 1),
    # YAML
    "key twice": Broken(L, "  clip: 1.0\n", "  clip: 1.0\n  batch_size: 16\n", "duplicate"),
    "section twice": Broken(L, "checkpoint:", "model:\n  bias: false\ncheckpoint:", "duplicate"),
    "tab": Broken(L, "  n_head: 6", "\tn_head: 6", "spaces"),
    "one space too few": Broken(L, "  n_head: 6", " n_head: 6", "line up"),
    "one space too many": Broken(L, "  n_head: 6", "   n_head: 6", "indent"),
    "unclosed quote": Broken(L, "source: books.txt", "source: 'books.txt", "quote"),
    "unclosed bracket": Broken(L, "[5000it, 2h]", "[5000it, 2h", "bracket"),
    "no space after the colon": Broken(L, "seed: 1", "seed:1", "seed: 1"),
    "equals": Broken(L, "n_layer: 6", "n_layer = 6", "n_layer: 6"),
    "section without its colon": Broken(L, "optimizer:\n", "optimizer\n", "optimizer:"),
    "anchor that is not there": Broken(L, "n_embd: 384", "n_embd: *width", "anchor"),
    "merge of what is no mapping": Broken(L, "  name: adamw", "  <<: adamw", "alias"),
    "merged misspelling": Broken(M, "    - source: web.jsonl\n      weight: 3\n", MERGED, "weight", 6),
    "typographic quotes": Broken(L, "tokenizer: char", "tokenizer: “char”", "char"),
    "space that does not break": Broken(L, "  n_head: 6", "  n_head:\u00a06", "space"),
    "indented by such spaces": Broken(L, "  n_head: 6", "\u00a0\u00a0n_head: 6", "space"),
    # the file as a whole
    "empty": Broken(L, "", "", "instar init", 0),
    "a list": Broken(L, "", "- n_layer: 6\n- n_head: 6\n", "key: value", 1),
    "JSON with a comma too many": Broken(L, "", '{\n "name": "books",\n "seed": 1,,\n}\n', "a value is missing", 3),
    "JSON with a wrong key": Broken(L, "", '{\n "name": "books",\n "sede": 1\n}\n', "seed", 3),
    "BOM and CRLF": Broken(L, "", "\ufeffname: books\r\nmodel:\r\n  n_layr: 6\r\n", "n_layer", 3),
    "a Python file": Broken(L, "", "batch_size = 32\nn_layer = 6\n", "key: value", 1),
    "schedule that is not there": Broken("scheduled.yaml", "schedule: grow.yaml", "schedule: gorw.yaml", "grow.yaml"),
}  # fmt: skip

if "graphs" not in built_in():
    CONFIGS = {name: broken for name, broken in CONFIGS.items() if broken.base != G}
    del GOOD[G]
