"""Files that a run leaves: lines of metrics, records in JSON, TensorBoard events. Each is whole or not there."""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from tensorboardX import SummaryWriter

from saddlefree.lab.errors import UserError
from saddlefree.lab.events import Event, Progress, Saving


def write_json(path: pathlib.Path, record: Any) -> None:
    """Writes a record, or leaves the old one as it was."""
    write_text(path, as_text(finite(record)) + "\n")


def as_text(record: Any, depth: int = 1) -> str:
    """JSON in which whatever holds nothing but numbers and texts is on one line."""
    if not isinstance(record, dict | list):
        return json.dumps(record, ensure_ascii=False)
    children = list(record.values() if isinstance(record, dict) else record)
    if not any(isinstance(child, dict | list) and child for child in children):
        return json.dumps(record, ensure_ascii=False)
    texts = [as_text(child, depth + 1) for child in children]
    if isinstance(record, dict):
        texts = [f"{json.dumps(str(name))}: {text}" for name, text in zip(record, texts, strict=True)]
    inside, ends = f",\n{' ' * depth}".join(texts), "{}" if isinstance(record, dict) else "[]"
    return f"{ends[0]}\n{' ' * depth}{inside}\n{' ' * (depth - 1)}{ends[1]}"


def read_json(path: pathlib.Path) -> Any:
    """Reads a record."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: is {path.parent} the folder of a run?") from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): restore it from a copy, or run again with another --out"
        ) from None


def read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file. A last line that was cut is not one; any other damage is an error."""
    if not path.exists():
        return
    try:
        *lines, _ = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged (no text): restore it from a copy, or run again") from None
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError
            yield found
        except ValueError:
            raise UserError(f"{path}, line {number} is damaged: delete the line, or run again") from None


def write_lines(path: pathlib.Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes a metrics file anew, or leaves the old one as it was; non-finite numbers become null."""
    write_text(path, "".join(json.dumps(finite(line)) + "\n" for line in lines))


class Metrics:
    """A listener that writes a run's `metrics.jsonl`: a line for each step or evaluation."""

    def __init__(self, folder: pathlib.Path, last_step: int):
        """Goes on after `last_step`; what was written of later steps is dropped."""
        path = folder / "metrics.jsonl"
        lines = list(read_lines(path))
        for number, line in enumerate(lines, 1):
            if not isinstance(line.get("step"), int):
                raise UserError(f"{path}, line {number} is damaged: delete the line, or run again")
        write_lines(path, [line for line in lines if line["step"] <= last_step])
        self._file = path.open("a")

    def __call__(self, event: Event) -> None:
        """Non-finite numbers become null."""
        if isinstance(event, Progress):
            self._file.writelines(json.dumps(finite(line)) + "\n" for line in event.lines)
            self._file.flush()
        elif isinstance(event, Saving):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


class TensorBoard:
    """A listener that writes the same lines as TensorBoard events."""

    def __init__(self, folder: pathlib.Path, last_step: int):
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)

    def __call__(self, event: Event) -> None:
        """Non-finite numbers are left out."""
        for line in event.lines if isinstance(event, Progress) else ():
            for name, value in line.items():
                if isinstance(value, float) and math.isfinite(value):
                    self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Ends the files."""
        self._writer.close()


def finite(record: Any) -> Any:
    """A record with None for what is not finite, as JSON has it."""
    if isinstance(record, dict):
        return {name: finite(value) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [finite(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file, or leaves the old one as it was."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
