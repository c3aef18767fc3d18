"""Which values of a metric are better, by its name; of how a run went, none is."""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["min", "max"]

_LOW = re.compile(
    "loss|mae|mse|rmse|msle|nll|bpb|bpc|cer|wer|error|perplexity|ppl|brier|ece|regret"
)
_HIGH = re.compile(
    "accuracy|acc|r2|auc|auroc|auprc|ap|map|f1|precision|recall|mcc|kappa|iou|dice|bleu|rouge|"
    "correlation|pearson|spearman|reward|return|score|variance"
)


def direction(metric: str) -> Direction | None:
    """`min` of losses and errors, `max` of accuracies and scores; None: no value is better.

    The last part of the name decides, and of that any word: `val/kind/accuracy`, `test/top5_acc`.
    """
    last = metric.rpartition("/")[2].lower()
    if ":" in last:
        return None  # a standard error
    words = [last.partition("@")[0], *last.split("_")]
    if any(map(_LOW.fullmatch, words)):
        return "min"
    return "max" if any(map(_HIGH.fullmatch, words)) else None
