"""One start of a run of GRPO: TRL's trainer, with Instar's order of questions, samplers and record."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from instar.data.order import Shuffled
from instar.distributed.failure import Interrupted, StoppedUnsaved, exit_code_of
from instar.distributed.signals import StopSignal
from instar.extensions.delta.callback import DeltaCallback
from instar.extensions.grpo.answers import final_answer_of_solution, is_correct
from instar.extensions.grpo.callbacks import GrpoRecord, RunCallback
from instar.extensions.grpo.checkpoints import read_marker, restore_rest, step_of
from instar.extensions.grpo.data import Question, Questions
from instar.extensions.grpo.evaluate import PassRates, evaluate_pass_rates, reference_loss
from instar.extensions.grpo.models import Ids, Sampling, chat_prompt, load_policy
from instar.extensions.grpo.options import Options
from instar.extensions.grpo.samplers import (
    LocalSampler,
    Sampler,
    ServerSampler,
    VllmSampler,
    sampling_seed,
)
from instar.extensions.grpo.servers import CompletionServer
from instar.record.recorder import Recorder


class GrpoRun:
    """One start of a run."""

    def __init__(
        self,
        options: Options,
        questions: Questions,
        server: CompletionServer | None,
        checkpoint: Path | None,
        recorder: Recorder,
        stop: StopSignal,
    ) -> None:
        self._options, self._checkpoint, self._stop = options, checkpoint, stop
        marker = {} if checkpoint is None else read_marker(checkpoint)
        self._record = GrpoRecord(
            recorder,
            options,
            len(questions.train),
            began=float(marker.get("began", time.time())),
            active_s=float(marker.get("active_s", 0.0)),
            best=_best_of(marker),
        )
        seed_everything(options.seed)
        self._model, self._tokenizer = load_policy(options.model, options.dataset)
        self._questions = questions
        self._held_out = questions.test[: options.eval_prompts]
        self._trainer = self._make_trainer(server)
        self._sampler = self._make_sampler(server)

    def train(self) -> None:
        trainer, record = self._trainer, self._record
        start = 0 if self._checkpoint is None else step_of(self._checkpoint)
        record.log_start(start, self._checkpoint, self._model, str(trainer.accelerator.device))
        if self._checkpoint is not None:
            restore_rest(self._checkpoint, trainer, self._options)
        failure = ""
        try:
            trainer.train(resume_from_checkpoint=self._checkpoint and str(self._checkpoint))
        except Exception as error:
            step = trainer.state.global_step
            if not self._stop.requested or step >= self._options.max_steps:
                record.log_failure(step, str(error), exit_code_of(error))
                raise
            failure = f"; its end failed: {type(error).__name__}: {error}"
        step = trainer.state.global_step
        if step >= self._options.max_steps:
            record.log_stop(step, f"reached {step}it", resumable=True)
            return
        record.log_stop(step, str(self._stop.requested), resumable=self._stop.resumable)
        if self._stop.resumable:
            message = f"{self._stop.requested} at step {step}; continue with --resume{failure}"
            raise Interrupted(message)
        raise StoppedUnsaved(f"{self._stop.requested} before the first checkpoint{failure}")

    def close(self) -> None:
        """Close the connection to a server."""
        if isinstance(self._sampler, ServerSampler):
            self._sampler.close()

    def _make_trainer(self, server: CompletionServer | None) -> Any:

        rows = {
            "prompt": [self._prompt(question) for question in self._questions_in_order()],
            "solution": [
                final_answer_of_solution(question.answer) for question in self._questions_in_order()
            ],
        }
        options = self._options
        deltas: list[Any] = []
        if options.delta_every:
            deltas = [DeltaCallback(options.delta_dir, options.delta_every, dtype="bf16")]
        callback = RunCallback(options, self._record, self._evaluate, self._stop, *deltas)
        trainer = GRPOTrainer(
            model=self._model,
            reward_funcs=exact_answer,
            args=_arguments(options, server),
            train_dataset=Dataset.from_dict(rows),
            processing_class=self._tokenizer,
            callbacks=[callback, *deltas],
            rollout_func=self._rollout,
        )
        trainer.remove_callback(PrinterCallback)
        callback.trainer = trainer
        return trainer

    def _make_sampler(self, server: CompletionServer | None) -> Sampler:
        options = self._options
        sampling = Sampling(options.max_tokens, options.temperature, options.top_p)
        if server is None:
            return LocalSampler(self._model, self._tokenizer.pad_token_id, sampling)
        if options.generation == "vllm":
            return VllmSampler(self._trainer)
        wait = options.server_timeout
        return ServerSampler(self._model, server, sampling, wait, self._stop.wait)

    def _questions_in_order(self) -> Iterator[Question]:
        """Yield the questions of all steps: one long epoch, a function of the seed alone."""
        options, questions = self._options, self._questions.train
        count = -(-options.max_steps // options.num_iterations) * options.prompts
        order = Shuffled(len(questions), options.seed)
        for epoch in range(-(-count // len(questions))):
            stop = min(len(questions), count - epoch * len(questions))
            yield from (questions[i] for i in order.indices(epoch, 0, stop))

    def _prompt(self, question: Question) -> str:
        if self._tokenizer.chat_template is None:
            return question.question
        text = "\n\n".join(filter(None, [question.question, self._questions.instruction]))
        messages = [{"role": "user", "content": text}]
        return chat_prompt(self._tokenizer, self._options.model, messages)

    def _ids(self, texts: Sequence[str]) -> list[Ids]:
        special = self._tokenizer.chat_template is None
        ids: list[Ids] = self._tokenizer(list(texts), add_special_tokens=special)["input_ids"]
        return ids

    def _rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Draw the completions of one step; TRL repeats each prompt as often as it wants some."""
        n, step = self._options.generations, trainer.state.global_step
        ids = self._ids(prompts[::n])
        seed = sampling_seed(self._options.seed, "train", step)
        completions = self._sampler.draw(ids, n, seed, step)
        return {
            "prompt_ids": [prompt for prompt in ids for _ in range(n)],
            "completion_ids": completions.ids,
            "logprobs": completions.log_probs,
        }

    def _evaluate(self, step: int) -> PassRates:
        options, tokenizer = self._options, self._tokenizer
        prompts = self._ids([self._prompt(question) for question in self._held_out])
        pass_at, errors = evaluate_pass_rates(
            self._held_out,
            prompts,
            self._sampler,
            partial(tokenizer.decode, skip_special_tokens=True),
            samples=options.eval_samples,
            ks=sorted({1, options.pass_k}),
            seed=sampling_seed(options.seed, "evaluate", step),
            step=step,
        )
        texts = [question.answer + tokenizer.eos_token for question in self._held_out]
        solutions = tokenizer(texts, add_special_tokens=False)["input_ids"]
        loss, tokens = reference_loss(self._model, tokenizer.pad_token_id, prompts, solutions)
        return PassRates(pass_at, errors, loss, tokens)


def exact_answer(completions: list[str], solution: list[str], **_: Any) -> list[float]:
    """Return the reward: 1 for a completion whose final answer is exactly that of the solution, else 0."""
    return [float(is_correct(*pair)) for pair in zip(completions, solution, strict=True)]


def _best_of(marker: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the best value up to a checkpoint and its step; older checkpoints do not have them."""
    best = marker.get("best")
    return None if best is None else (float(best[0]), int(best[1]))


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy, and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def _arguments(options: Options, server: CompletionServer | None) -> Any:
    cuda = torch.cuda.is_available()
    if options.wandb:
        os.environ.setdefault("WANDB_RUN_ID", options.wandb_name)
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_TAGS", f"seed{options.seed}")
        os.environ.setdefault("WANDB_DIR", str(options.log_dir))
    return GRPOConfig(
        output_dir=str(options.output_dir),
        run_name=options.wandb_name,
        report_to=["wandb"] if options.wandb else [],
        seed=options.seed,
        data_seed=options.seed,
        shuffle_dataset=False,  # the rows are in order
        max_steps=options.max_steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.accumulation,
        num_generations=options.generations,
        num_iterations=options.num_iterations,
        max_completion_length=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        learning_rate=options.lr,
        lr_scheduler_type="constant",  # a resumed run may be longer
        beta=options.beta,
        logging_steps=1,
        save_steps=options.save_every,
        save_total_limit=2,
        use_cpu=not cuda,
        bf16=cuda,
        activation_checkpointing=cuda,
        dataloader_pin_memory=cuda,
        disable_tqdm=True,
        use_vllm=options.generation == "vllm",
        vllm_mode="server",
        vllm_server_base_url=None if server is None else server.address,
        vllm_group_port=options.vllm_group_port,
        generation_kwargs={},
    )
