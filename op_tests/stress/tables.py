"""Damaged tuned tables, and tables that several tuners write at once, killed ones among them: no row is lost.

A reader must return every row of a file or refuse the file by line; what a row says is parsed here a second time.
"""

from __future__ import annotations

import csv
import io
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from hipforge import ops
from hipforge.errors import ConfigError
from hipforge.ops.core.tuned import read_rows, shipped_path

FIELDS = (
    "", " ", "0", "-1", "1e3", "2.5", "nan", "inf", "9" * 400, "0x10", "1_0", "٣", "gfx950", "gfx951", "gfx94",
    "GFX950", "x", '"', "'", ",", "\t", "\r", "\x00", "\ufeff", "é", "measured:MI355X/rocm 7.0", "model:1", "measured:",
    "None",
    "True", "=1+1",
)  # fmt: skip


def damaged(choose: random.Random, text: str) -> bytes:
    """A CSV with one to four of its bytes, fields, lines or ends changed."""
    for _ in range(choose.choice((0, 1, 1, 1, 2, 4))):
        lines = text.split("\n")
        at = choose.randrange(len(lines))
        kind = choose.randrange(8)
        if kind <= 2:
            fields = lines[at].split(",")
            fields[choose.randrange(len(fields))] = choose.choice(FIELDS)
            lines[at] = ",".join(fields)
        elif kind == 3:
            lines.insert(at, lines[choose.randrange(len(lines))])
        elif kind == 4:
            lines[at] = lines[at][: choose.randrange(len(lines[at]) + 1)]
        elif kind == 5:
            lines.insert(at, choose.choice(("", " ", ",", "#", '"', "\x00", lines[at] + ",1")))
        elif kind == 6:
            choose.shuffle(lines)
        else:
            del lines[at]
        text = choose.choice(("\n", "\n", "\n", "\r\n", "\r")).join(lines)
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if choose.random() < 0.1 and raw:
        raw[choose.randrange(len(raw))] = choose.randrange(256)
    return bytes(raw)


def _lines_of(raw: bytes) -> list[list[str]]:
    text = raw.decode("utf-8-sig")
    return [fields for fields in csv.reader(io.StringIO(text, newline="")) if fields]


def reads(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Read ``count`` damaged tables: each is refused by a ConfigError that names it, or every row of it is there."""
    choose = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    schemas = [ops.schema_of(name) for name in ops.families()]
    texts = {
        schema.family: shipped_path(schema).read_text().splitlines()
        for schema in schemas
        if shipped_path(schema).is_file()
    }
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    path = folder / "damaged.csv"
    for number in range(count):
        schema = choose.choice([schema for schema in schemas if schema.family in texts])
        header, *rows = texts[schema.family]
        some = "\n".join([header, *choose.sample(rows, min(len(rows), choose.randrange(1, 8)))])
        raw = damaged(choose, some)
        path.write_bytes(raw)
        try:
            found = read_rows(schema, path)
        except ConfigError as error:
            ended["refused"] += 1
            if not str(error).startswith(f"{path}:"):
                wrong.append(f"seed {seed}, table {number}: the message does not name a line: {str(error)[:200]}")
            continue
        except Exception as error:
            ended["raw exception"] += 1
            wrong.append(f"seed {seed}, table {number}: {type(error).__name__}: {error}: {raw!r}")
            continue
        ended["read"] += 1
        names, *lines = _lines_of(raw)
        if len(found) != len(lines):
            wrong.append(f"seed {seed}, table {number}: {len(found)} rows of {len(lines)} were read: {raw!r}")
            continue
        for row, fields in zip(found, lines, strict=True):
            for name, text in zip(names, fields, strict=True):
                value, text = row.values.get(name.strip()), text.strip()
                same = (
                    value is None if not text else (value == text if isinstance(value, str) else float(text) == value)
                )
                if not same:
                    wrong.append(f"seed {seed}, table {number}: {name} reads {value!r} for {text!r}")
    return ended, wrong


WRITER = """
import json, sys
sys.path.insert(0, {helpers!r})
from pathlib import Path
from hipforge import ops
from hipforge.tuning.table_writer import merge_rows
schema = ops.schema_of("mxfp8_gemm")
for row in json.load(sys.stdin):
    merge_rows(Path({path!r}), schema, [row])
    print(row["M"], row["N"], row["K"], flush=True)
"""


def writes(seed: int, writers: int, rows: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Let tuners write their own rows into one table, a third of them killed: every row they reported is in it."""
    choose = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tuned.csv"
    schema = ops.schema_of("mxfp8_gemm")
    started = []
    for writer in range(writers):
        lines = [
            {"gfx": "gfx950", "cu_num": 256, "M": writer + 1, "N": 64 * (row + 1), "K": 256,
             "kernel": "smallm_mxfp8_gemv", "config": "block_n=8", "use_hip": 1, "us": None, "stock_us": None,
             "best_baseline_us": None, "err": 0.0, "source": "model:stress"}
            for row in range(rows)
        ]  # fmt: skip
        program = WRITER.format(helpers=str(Path(__file__).parent.parent), path=str(path))
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(lines))
        process.stdin.close()
        started.append(process)
    for victim in choose.sample(started, writers // 3):
        assert victim.stdout is not None
        time.sleep(choose.uniform(0.0, 0.3))
        victim.kill()
    ended: Counter[str] = Counter()
    reported: set[tuple[int, ...]] = set()
    for process in started:
        assert process.stdout is not None
        text = process.stdout.read()
        reported |= {tuple(map(int, line.split())) for line in text.splitlines() if len(line.split()) == 3}
        ended["killed" if process.wait() else "finished"] += 1
    there = (
        {tuple(row.values[name] for name in ("M", "N", "K")) for row in read_rows(schema, path)}
        if path.exists()
        else set()
    )
    ended["rows reported"], ended["rows there"] = len(reported), len(there)
    lost = sorted(reported - there)
    return ended, [f"seed {seed}: rows {lost[:5]} of {len(lost)} are lost"] if lost else []
