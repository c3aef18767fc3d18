"""What other trainers call Instar's keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from instar.config.fields import Root, keys, sections

CALLED: Mapping[str, str] = {
    "name": "run_name experiment experiment_name project",
    "seed": "random_seed manual_seed rng_seed",
    "device": "accelerator",
    "precision": "dtype fp16 bf16 amp autocast mixed_precision torch_dtype",
    "compile": "torch_compile use_compile",
    "resume": "resume_from_checkpoint init_from",
    "model.context": "block_size max_seq_len seq_len seq_length sequence_length n_ctx n_positions "
    "max_length context_length max_position_embeddings",
    "model.n_embd": "d_model hidden_size hidden_dim embed_dim dim",
    "model.width": "hidden_channels d_model n_embd hidden_size hidden_dim hidden dim",
    "model.n_head": "num_attention_heads num_heads",
    "model.n_kv_head": "num_key_value_heads",
    "model.n_layer": "num_hidden_layers num_layers depth",
    "model.n_mlp": "intermediate_size d_ff ffn_dim dim_feedforward ffn_hidden_size",
    "model.tied": "tie_word_embeddings weight_tying",
    "model.bias": "use_bias",
    "model.positions": "rope rotary use_rope pos_emb",
    "model.activation": "hidden_act activation_function",
    "model.layer": "conv conv_type layer_type",
    "model.pooling": "pool aggr readout",
    "data.source": "dataset data_dir train_file corpus",
    "data.order": "shuffle",
    "data.workers": "num_workers dataloader_num_workers",
    "train.batch_size": "batch micro_batch_size train_batch_size per_device_train_batch_size",
    "train.gradient_accumulation_steps": "grad_accum accumulate_grad_batches grad_accum_steps",
    "train.gradient_checkpointing": "checkpoint_activations activation_checkpointing",
    "train.clip": "grad_clip max_grad_norm max_norm gradient_clip_val gradient_clipping",
    "train.ema": "ema_decay",
    "train.until": "epochs num_epochs n_epochs max_epochs num_train_epochs steps max_steps num_steps "
    "total_steps train_steps max_iters num_iters iterations max_tokens total_tokens budget",
    "optimizer.name": "optimizer.type optim",
    "optimizer.lr": "learning_rate base_lr max_lr",
    "optimizer.beta1": "betas adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "epsilon adam_epsilon",
    "optimizer.weight_decay": "wd l2",
    "learning_rate.shape": "decay_lr scheduler lr_scheduler lr_scheduler_type lr_decay_style "
    "learning_rate.name learning_rate.type",
    "learning_rate.warmup_iters": "warmup warmup_steps num_warmup_steps warmup_ratio",
    "learning_rate.min_lr_ratio": "min_lr",
    "eval.eval_interval": "eval_every eval_steps val_check_interval",
    "eval.batch_size": "eval_batch_size per_device_eval_batch_size",
    "early_stopping.rules": "early_stopping_patience",
    "checkpoint.every_steps": "save_every save_steps save_interval checkpoint_every ckpt_interval",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.best_of": "metric_for_best_model monitor",
    "record.trackers": "logger report_to",
    "record.trackers.wandb": "use_wandb wandb_log wandb_project",
    "record.log_interval": "logging_steps log_every log_every_n_steps",
    "record.out_dir": "output output_dir save_dir log_dir",
    "parallel.world_size": "gpus num_gpus n_gpus nproc nproc_per_node num_processes",
}
"""By key or section, the names; one with a dot is meant within its section alone."""

INSIDE: Mapping[str, str] = {
    "trigger_loss": "loss_below",
    "loss": "loss_below",
    "max_wait_iters": "waited",
    "wait": "waited",
    "step": "at_step",
    "num_classes": "classes",
    "type": "kind",
    "path": "source",
    "proportion": "weight",
}
"""The same of keys in lists: of operations, triggers, heads, parts of a mixture."""


@cache
def familiar(root: Root) -> dict[str, str]:
    """From a name that others use to the dotted key, or section, that this config has for it."""
    return {
        name: key
        for key, names in CALLED.items()
        if key in keys(root) or key in sections(root)
        for name in names.split()
    }
