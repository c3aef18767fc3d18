"""`instar sample`: let a trained model write."""

from __future__ import annotations

import click


@click.command()
@click.argument("run", metavar="RUN|CHECKPOINT")
@click.option("--prompt", default="\n", show_default="a new line", help="What it goes on from.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--samples", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0.0))
@click.option("--top-k", default=50, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda")
def sample(
    run: str,
    prompt: str,
    tokens: int,
    samples: int,
    temperature: float,
    top_k: int,
    seed: int,
    device: str,
) -> None:
    """Print text that the model of a run (its folder, id, name, or `latest`) goes on to write."""
    from instar.checkpoint.store import resolve

    path = resolve(run)

    import torch

    from instar.config.errors import ConfigError
    from instar.data.tokenizer import load_tokenizer
    from instar.models.generate import generate
    from instar.models.saved import load_gpt

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(path.parent.parent)
    prompt_ids = tokenizer.encode(prompt)
    if len(prompt_ids) == 0:
        raise ConfigError.one("the prompt is empty", where="--prompt", hint="give some text")
    model = load_gpt(path, device)
    start = torch.tensor([prompt_ids.tolist()] * samples, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    written = generate(
        model, start, tokens, temperature=temperature, top_k=top_k, generator=generator
    )
    for number, row in enumerate(written.tolist()):
        if number:
            click.echo("─" * 8)
        click.echo(tokenizer.decode(row))
