"""Errors that teach: what is wrong, where, and what to write instead.

Every error a user may meet derives from `InstarError`; the command line prints `str(error)`
and ends with its `exit_code`, without a traceback.
"""

from __future__ import annotations

from dataclasses import dataclass


class InstarError(Exception):
    """An error with a message for a person and an exit code for the shell (4: a run failed)."""

    exit_code: int = 4


@dataclass(frozen=True)
class Problem:
    """One mistake.

    `message` is a sentence without a full stop; `where` a place such as "grow.yaml:4:3",
    "--set model.n_head=3" or a key; `excerpt` the offending line with a caret under it;
    `hint` continues the sentence ("did you mean 'n_head'?"); `key` is the dotted key that is
    meant, if there is one, and `task` whose key it is, if not language's.
    """

    message: str
    where: str = ""
    excerpt: str = ""
    hint: str = ""
    key: str = ""
    task: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        excerpt = f"\n{self.excerpt}" if self.excerpt else ""
        return f"{place}{self.message}{hint}{excerpt}"


class ConfigError(InstarError):
    """Bad configuration, input or usage: all the mistakes found, before anything is started."""

    exit_code = 2

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @classmethod
    def one(
        cls, message: str, where: str = "", hint: str = "", *, excerpt: str = "", key: str = ""
    ) -> ConfigError:
        return cls(Problem(message, where, excerpt, hint, key))

    def __str__(self) -> str:
        count = len(self.problems)
        last = f"{count} error{'' if count == 1 else 's'}. Nothing was started."
        about = next((problem for problem in self.problems if problem.key), None)
        if about is not None:
            # an item's keys are told with those of its list
            listed, bracket, _ = about.key.partition("[")
            words = [listed if bracket else about.key.rpartition(".")[0]]
            words += ["--task", about.task] if about.task else []
            last += f"   Keys: instar config schema {' '.join(filter(None, words))}".rstrip()
        return "\n".join([*map(str, self.problems), last])
