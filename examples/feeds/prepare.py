"""Make the rows that these examples read: the Python standard library's source, a row for each file.

    python examples/feeds/prepare.py

writes data/feeds/train-0*.parquet, eight shards with the columns `text` and `tokens` (its bytes),
and data/feeds/held_out.jsonl.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path("data/feeds")
SHARDS = 8
HELD_OUT = 20
"""every so-manieth file"""


def main() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    texts = [file.read_text("utf-8") for file in sorted(library.glob("*.py"))]
    held_out, train = texts[::HELD_OUT], [t for n, t in enumerate(texts) if n % HELD_OUT]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(SHARDS):
        rows = train[number::SHARDS]
        tokens = pa.array([list(text.encode()) for text in rows], pa.list_(pa.uint16()))
        table = pa.table({"text": rows, "tokens": tokens})
        pq.write_table(table, FOLDER / f"train-{number:02d}.parquet")
    with (FOLDER / "held_out.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in held_out)
    print(f"{len(train)} rows in {SHARDS} shards, {len(held_out)} held out, in {FOLDER}")


if __name__ == "__main__":
    main()
