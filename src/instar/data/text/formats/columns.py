"""What the column of a data set holds: text or token ids, of any of Arrow's types for them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from instar.config.errors import ConfigError
from instar.config.language import DataConfig

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


def check_column(features: datasets.Features, data: DataConfig) -> None:
    check_schema(features.arrow_schema, data, data.source)


def check_schema(schema: pa.Schema, data: DataConfig, place: str) -> None:
    key = "data.text_field" if data.tokens_field is None else "data.tokens_field"
    name = data.tokens_field or data.text_field
    if name not in schema.names:
        raise ConfigError.of(
            f"{place} has no column {name!r} (columns: {', '.join(schema.names)})",
            where=key,
            hint="name the column of the text in data.text_field, or that of token ids in "
            "data.tokens_field",
            key=key,
        )
    dtype = schema.field(name).type
    if not (is_text(dtype) if data.tokens_field is None else is_ids(dtype)):
        expected = "text" if data.tokens_field is None else "lists of token ids"
        raise ConfigError.of(
            f"the column {name!r} of {place} holds {dtype}, not {expected}",
            where=key,
            hint="name another column",
            key=key,
        )


def is_text(dtype: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    of_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    of_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(is_kind(dtype) for is_kind in (*of_text, *of_bytes))


def is_ids(dtype: pa.DataType) -> bool:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(dtype) for is_list in lists) and pa.types.is_integer(dtype.value_type)


def other_columns(error: BaseException, place: str) -> ConfigError | None:
    """Return the error of a file with other columns than the first, which `datasets` refuses; None of others.

    Args:
        place: where it was read, if the error does not name the file.
    """
    from datasets.exceptions import DatasetGenerationCastError
    from datasets.table import CastError

    if isinstance(error, CastError):
        what = error.details().rstrip(".")
    elif isinstance(error, DatasetGenerationCastError):
        pieces = str(error).split("\n\n")
        what = pieces[1].rpartition("at some point ")[2]
        place = next(
            (p for before, p in pairwise(pieces) if "generating data using" in before), place
        )
    else:
        return None
    return ConfigError.of(
        f"the files do not have the same columns, which `datasets` needs: {what}",
        where=place,
        hint="give the files themselves, as a folder or glob: of these only the column that is trained on is "
        "read (hf download NAME --repo-type dataset --local-dir FOLDER; archives unpacked)",
        key="data.source",
    )
