"""Texts of which only the size is known."""

from __future__ import annotations

from instar.config.language import LanguageConfig
from instar.models.architecture import resolve_architecture
from instar.tasks.language import LanguageSpec


def spec_for_tokens(config: LanguageConfig, tokens: int | None, vocab_size: int) -> LanguageSpec:
    """A run on so many training tokens; None: nobody has counted them."""
    return LanguageSpec(config, resolve_architecture(config.model, vocab_size), lambda _: tokens)
