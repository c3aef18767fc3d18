"""`instar completion`: the script that makes a shell complete commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_INSTAR_COMPLETE"
"""Environment variable by which a shell asks for completions, see `instar.cli.main`."""


@click.command(
    epilog='bash:  eval "$(instar completion bash)"  in ~/.bashrc; zsh: the same in ~/.zshrc; '
    "fish:  instar completion fish > ~/.config/fish/completions/instar.fish"
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options, runs, checkpoints and keys."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "instar", VARIABLE).source())
