"""The group `instar delta`; its commands are in `commands`, which imports numpy."""

from __future__ import annotations

import click

from instar.cli.options import LazyGroup

_HERE = "instar.extensions.delta.commands"

_TABLE = {
    "apply": (
        f"{_HERE}:apply_link",
        "Write the state that LINK makes of BASE into the new safetensors file NEW.",
    ),
    "checkout": (
        f"{_HERE}:checkout",
        "Write a state of a chain into the new safetensors file NEW; by default the last.",
    ),
    "create": (
        f"{_HERE}:create_link",
        "Write what changed from BASE to NEW into the new file LINK.",
    ),
    "export": (
        f"{_HERE}:export_chain",
        "Write a state of a chain as the new folder FOLDER, which transformers loads.",
    ),
    "gc": (f"{_HERE}:gc", "Remove old states of a chain, and what crashes left behind."),
    "info": (f"{_HERE}:info", "Print what a link, or an anchor of a chain, holds."),
    "log": (
        f"{_HERE}:list_states",
        "List the states of a chain: step, size, and how many elements changed.",
    ),
    "squash": (
        f"{_HERE}:squash",
        "Replace the links FIRST to LAST by one; the states between them are given up.",
    ),
    "verify": (
        f"{_HERE}:verify_chains",
        "Read every byte of a chain, rebuild every state and compare its hash; of a LINK, its checksum.",
    ),
}


@click.group(cls=LazyGroup, table=_TABLE)
def delta() -> None:
    """Save weights as what changed since an earlier state, and rebuild them bit for bit.

    A CHAIN is a folder of anchors (whole states) and links (changes); of a RUN, its folder deltas.
    """
