"""Does a grown model solve small tasks better than one from scratch with the same loss on text?

    python studies/growth/reasoning.py [--quick] [--work DIR] [--workers N]

Models of 8 × 32 train on Python source, among which are documents of small tasks (`tasks.py`). Each seed trains the final size from
scratch and grows one to it, as the trials of `growth.py` chose, at two budgets each. Each model's answers to
other examples are compared with the right ones: nats per token of the answer, and the share of answers all of whose tokens have the highest probability. A line through the two budgets of each, score against the loss on held-out source, gives the
score of both at the loss that the final size has at its end, and the difference is paired by seed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import torch

import instar
from columns import GROWN, PLANS, SCRATCH
from curves import spread
from growth import EIGHT, RECIPE, SOURCE, TINY
from instar.config.language import LanguageConfig
from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.data.text.tokenizer import Tokenizer
from report import Case, case, options, publish
from segments import Segment, Workshop, branch_of, place_of, study_parser
from study import Arm, Run, Shape, segments
from tasks import TASKS, examples

SEEDS = (1, 2, 3, 4)
TOKENS_PER_PARAMETER = 20
SHARES = {SCRATCH: (0.7, 1.0), GROWN: (0.7, 0.92)}
"""Budgets, as shares of the FLOPs of the final size."""
TASK_SHARE = 0.3
"""Of the bytes of the text to train on."""
ASKED = 500
"""Examples of each task."""


@dataclass(frozen=True)
class Score:
    """How a model answers the examples of a task."""

    nats: float
    """per token of the answers, with all tokens before it given"""
    right: float
    """share of answers all of whose tokens have the highest probability"""


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    loss: float
    """on held-out source, nats"""
    scores: Mapping[str, Score]
    """by task"""


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    run_options = options(arguments)
    shape, seeds = (replace(TINY, context=64), SEEDS[:1]) if run_options.quick else (EIGHT, SEEDS)
    with place_of(arguments) as work:
        size = 200_000 if run_options.quick else 16_000_000
        workshop = Workshop(work, prepare_data(work, shape.vocabulary, size), arguments.workers)
        horizon = 1 if run_options.quick else TOKENS_PER_PARAMETER
        runs = {seed: runs_of(shape, seed, horizon) for seed in seeds}
        all_segments = segments(
            run for ways in runs.values() for pair in ways.values() for run in pair
        )
        results = workshop.results(all_segments)
        folders = dict(folder for segment in all_segments for folder in folders_of(segment, work))
        models = {
            seed: {
                way: [
                    Trained(results[run.name].loss, scores_of(folders[run.name], run_options.quick))
                    for run in pair
                ]
                for way, pair in ways.items()
            }
            for seed, ways in runs.items()
        }
        publish(
            "reasoning", cases(list(models.values())), run_options, runs_at_a_time=arguments.workers
        )


def runs_of(shape: Shape, seed: int, tokens_per_parameter: int) -> dict[str, list[Run]]:
    """Of a seed, by way: two budgets each."""
    final = Arm(shape, rate=0.02, decay=0.5, rest=0.01)
    arms = {SCRATCH: final, GROWN: PLANS[3].arm(final)}
    flops = final.flops(tokens_per_parameter * shape.parameters / (shape.batch * shape.context))
    return {
        way: [Run(arm, seed, arm.steps(share * flops)) for share in SHARES[way]]
        for way, arm in arms.items()
    }


def folders_of(segment: Segment, work: Path) -> Iterator[tuple[str, Path]]:
    """The folder of each result of a segment."""
    run = work / segment.name
    yield segment.name, run
    for name, branch, _ in segment.branches:
        yield name, branch_of(run, branch)


def prepare_data(work: Path, vocabulary: int, size: int) -> tuple[str, ...]:
    """Settings of every run; makes the data set, of source and of examples of the tasks."""
    training, held_out = work / "training.jsonl", work / "held-out.jsonl"
    if not (work / "tokens").exists():
        draw = random.Random(0)
        folder, _, pattern = SOURCE.partition("/[")
        files = sorted(Path(folder).glob(f"[{pattern}"))
        draw.shuffle(files)
        source, remaining_bytes = [], size
        for path in files:
            if remaining_bytes <= 0:
                break
            source.append(path.read_text("utf-8", errors="replace"))
            remaining_bytes -= len(source[-1].encode())
        held_out_count = max(1, len(source) // 20)
        tasks = list(task_documents(round(TASK_SHARE * size / (1 - TASK_SHARE))))
        documents = [*source[held_out_count:], *tasks]
        draw.shuffle(documents)
        for file, texts in ((training, documents), (held_out, source[:held_out_count])):
            lines = (json.dumps({"text": text}) + "\n" for text in texts)
            file.write_text("".join(lines), encoding="utf-8")
    data = (
        f"data.source={training.absolute()}",
        f"data.val_source={held_out.absolute()}",
        f"data.vocab_size={vocabulary}",
        f"data.path={(work / 'tokens').absolute()}",
    )
    config = load_config(None, (*RECIPE, *data)).config
    assert isinstance(config, LanguageConfig)
    prepare_dataset(config.data, config.seed, say=lambda text: print(text, file=sys.stderr))
    return (*RECIPE, *data)


def task_documents(size: int) -> Iterator[str]:
    """Documents of 40 examples of all tasks in turn, of so many bytes in all."""
    number = 0
    while size > 0:
        lines = [
            examples(task, 1, f"training {number} {place}")[0].text
            for place, task in enumerate([*TASKS] * 7)
        ]
        random.Random(number).shuffle(lines)
        document = "".join(lines)
        yield document
        size -= len(document)
        number += 1


def scores_of(run: Path, quick: bool) -> dict[str, Score]:
    """How a run's last model does each task; kept beside the run."""
    file = run / "scores.json"
    if not file.exists():
        model = instar.load_model(run, device="cpu")
        tokenizer = instar.load_tokenizer(run)
        scores = {task: score_of(model, tokenizer, task, 20 if quick else ASKED) for task in TASKS}
        pairs = {task: [score.nats, score.right] for task, score in scores.items()}
        file.write_text(json.dumps(pairs))
    return {task: Score(*values) for task, values in json.loads(file.read_text()).items()}


@torch.no_grad()
def score_of(model: torch.nn.Module, tokenizer: Tokenizer, task: str, number: int) -> Score:
    """Ask for the answers to examples that are drawn with another seed than those trained on."""
    nats, tokens, right = 0.0, 0, 0
    for example in examples(task, number, "asked"):
        texts = example.prompt, example.prompt + example.answer
        prompt, sequence = (tokenizer.encode(text).tolist() for text in texts)
        if sequence[: len(prompt)] != prompt:
            raise ValueError(f"the tokens of {texts[1]!r} do not begin with those of its prompt")
        logits = model(torch.tensor([sequence[:-1]]))[0, len(prompt) - 1 :]
        answer = torch.tensor(sequence[len(prompt) :])
        nats += torch.nn.functional.cross_entropy(logits, answer, reduction="sum").item()
        tokens += len(answer)
        right += bool((logits.argmax(-1) == answer).all())
    return Score(nats / tokens, right / number)


def at_loss(pair: Sequence[Trained], task: str, loss: float) -> Score:
    """The score at a loss, on the line through two budgets."""
    low, high = pair
    share = (loss - low.loss) / (high.loss - low.loss)
    first, second = low.scores[task], high.scores[task]
    return Score(
        first.nats + share * (second.nats - first.nats),
        first.right + share * (second.right - first.right),
    )


def cases(seeds: Sequence[Mapping[str, Sequence[Trained]]]) -> list[Case]:
    """The differences at the loss of the final size; the mean over all tasks says whether growth has given anything."""
    targets = [seed[SCRATCH][-1].loss for seed in seeds]
    case_list = [case("loss on source at which all are compared", targets, "nats")]
    differences: dict[str, list[float]] = {}
    for task in TASKS:
        pairs = [
            (at_loss(seed[GROWN], task, loss), seed[SCRATCH][-1].scores[task])
            for seed, loss in zip(seeds, targets, strict=True)
        ]
        case_list.append(case(f"{task}: from scratch", [s.nats for _, s in pairs], "nats"))
        case_list.append(
            case(f"{task}: from scratch, right", [100 * s.right for _, s in pairs], "%")
        )
        differences[task] = [grown_score.nats - s.nats for grown_score, s in pairs]
        right = [100 * (grown_score.right - s.right) for grown_score, s in pairs]
        case_list += _between(f"{task}: grown less scratch", differences[task], "Δ nats")
        case_list += _between(f"{task}: grown less scratch, right", right, "%")
    means = [sum(of_seed) / len(TASKS) for of_seed in zip(*differences.values(), strict=True)]
    return [*case_list, *_between("all tasks: grown less scratch", means, "Δ nats", bar=0.0)]


def _between(name: str, values: Sequence[float], unit: str, bar: float | None = None) -> list[Case]:
    """A mean and its interval."""
    between = spread(values)
    return [
        case(name, [between.mean], unit, most=bar),
        case(f"{name}, at least", [between.low], unit),
        case(f"{name}, at most", [between.high], unit),
    ]


if __name__ == "__main__":
    main()
