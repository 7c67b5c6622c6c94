"""A batch's output: a line for each answered line of the input, appended and flushed as answers come.

So a job that is killed loses only the requests in progress, and the next job continues from the output.
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from bonsai_jax.batch import lines
from bonsai_jax.protocols import openai
from bonsai_jax.protocols.errors import RequestError

BEGINNING = b'{"id": "batch_req_'  # of every line that we write


class Results:
    """The output file, locked against other writers.

    done   custom_ids of the answered lines

    Opening it drops a last line that was written in part, and lines with an error or without a response,
    which are tried again. An empty file is removed if the job fails before its first answer.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = _locked(path)
        with contextlib.ExitStack() as unless_read:
            unless_read.callback(lambda: self._file.close())  # `_rewrite` opens another
            self.done, dropped = self._read()
            if dropped:
                self._rewrite(dropped)
            unless_read.pop_all()

    def append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _read(self) -> tuple[set[str], set[int]]:
        """custom_ids of answers, and numbers of lines to drop."""
        answers: dict[str, int] = {}
        dropped: set[int] = set()
        for number, raw in enumerate(self._file, 1):
            where = f"{self.path}:{number}"
            if not raw.endswith(b"\n") and BEGINNING.startswith(raw[: len(BEGINNING)]):
                dropped.add(number)
                break
            line = lines.parse(raw, where)
            custom_id = line.get("custom_id")
            if not isinstance(custom_id, str) or not {"response", "error"} <= line.keys():
                raise ValueError(f"{where}: not a line of a batch's output; give another file")
            if line["error"] is not None or not isinstance(line["response"], dict):
                dropped.add(number)
                continue
            if custom_id in answers:
                both = f"lines {answers[custom_id]} and {number}"
                raise ValueError(f"{self.path}: {both} both answer {custom_id!r}; delete one")
            answers[custom_id] = number
        return set(answers), dropped

    def _rewrite(self, dropped: set[int]) -> None:
        """Replace the file atomically, so that no answer can be lost."""
        self._file.seek(0)
        other = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with other.open("wb") as file:
            file.writelines(raw for number, raw in enumerate(self._file, 1) if number not in dropped)
            file.flush()
            os.fsync(file.fileno())
        os.replace(other, self.path)
        self._file.close()
        self._file = _locked(self.path)


class StandardOutput:
    """Results on standard output, where no line is answered yet."""

    def __init__(self):
        self.done: set[str] = set()

    def append(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)


Output = Results | StandardOutput


@contextlib.contextmanager
def opened(output: str | Path) -> Iterator[Output]:
    """The output; "-" is standard output."""
    if str(output) == "-":
        yield StandardOutput()
        return
    with Results(Path(output)) as results:
        yield results


def _locked(path: Path) -> BinaryIO:
    """Open a file to read and append, and lock it."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file that a job could go on with; give the name of one")
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path}: another job writes it; wait for it, or give another file") from None
    file.seek(0)
    return file


def answered(line: lines.Line, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the output with an answer."""
    return _line(line, 200, body, None)


def failed(line: lines.Line, error: Exception) -> dict[str, Any]:
    """A line of the output with an error, of the request (400) or ours (500). The message is in the
    response's body, as from a server, and in `error`, which is null in a line with an answer."""
    reason = error if isinstance(error, RequestError) else RequestError(500, str(error))
    body = openai.error(reason)
    return _line(line, reason.status, body, {"code": body["error"]["code"], "message": str(error)})


def _line(
    line: lines.Line, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": secrets.token_hex(16), "body": body},
        "error": error,
    }
