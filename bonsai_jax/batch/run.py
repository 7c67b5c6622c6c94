"""A batch: every line without an answer, many at once, each appended to the output when it is answered.

    lines of the input -> `window` coroutines, each with a line -> answer(line) -> a line of the output

`answer` uses an Engine in this process (answers.py) or actors in others (on_ray.py); nothing else differs.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bonsai_jax.batch import lines as reading
from bonsai_jax.batch.answers import Answers, Job
from bonsai_jax.batch.lines import Line
from bonsai_jax.batch.results import Output, opened
from bonsai_jax.model import Model
from bonsai_jax.progress import Progress, shown
from bonsai_jax.weights import placement

Answer = Callable[[Line], Awaitable[dict[str, Any]]]
# Lines in progress for each sequence of the batch, so that a row that becomes free finds a line whose prompt
# is tokenized.
LINES_PER_ROW = 4


@dataclasses.dataclass
class Report:
    """What a run did, and what it cost.

    lines            answered by this run
    errors           lines that this run could not answer
    done_before      lines that the output had before
    prompt_tokens, new_tokens   of the lines that this run answered
    seconds          without the time to load a model
    devices          in use during the run
    cpu_seconds      of this process, all threads together; 0 where actors did the work
    """

    done_before: int = 0
    lines: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    devices: int = 0
    cpu_seconds: float = 0.0

    @property
    def device_seconds(self) -> float:
        return self.seconds * self.devices

    @property
    def tok_s(self) -> float:
        """New tokens a second."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_per_1000_lines(self) -> float | None:
        done = self.lines + self.errors
        return 1000 * self.seconds / done if done else None

    def count(self, line: dict[str, Any]) -> None:
        if line["error"] is not None:
            self.errors += 1
            return
        usage = line["response"]["body"]["usage"]
        self.lines += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.new_tokens += usage["completion_tokens"]


def run(
    model: Model | Callable[[str], Model],
    source: str | Path,
    output: str | Path,
    job: Job = Job(),
    *,
    named: str | None = None,
    progress: Progress = False,
) -> Report:
    """Answer each line of `source` that `output` does not answer yet, and append the answers to `output`.

    source, output   files; "-" is standard input or output
    model     a model, or a function that loads one by its name, called once the files are read and lines
              remain
    named     the name to load; None: the name in the lines, or "demo" where they have none
    progress  True: a bar on stderr; or called with lines answered so far and in all
    Raises ValueError for a malformed file, before anything is written, and RuntimeError if the engine gives
    up; `output` then has the answers so far.
    """
    with reading.opened(source) as lines, opened(output) as results:
        one_model = callable(model) and named is None
        needs = reading.needs(lines, reading.read(lines), results.done, one_model=one_model)
        if not needs.lines:
            return Report(done_before=len(results.done))
        loaded = model((needs.model or "demo") if named is None else named) if callable(model) else model
        answer, cpu = Answers(loaded, job, needs), time.process_time()
        try:
            window = LINES_PER_ROW * job.batch_size * placement.size(loaded.mesh, placement.DATA)
            report = asyncio.run(each(lines, needs.lines, results, answer, window, progress))
        finally:
            answer.close()
        report.devices = 1 if loaded.mesh is None else loaded.mesh.size
        report.cpu_seconds = time.process_time() - cpu
        return report


async def each(
    source: Path,
    total: int,
    results: Output,
    answer: Answer,
    window: int,
    progress: Progress,
) -> Report:
    """Answer the lines that are not in `results`, at most `window` at once."""
    report, began = Report(done_before=len(results.done)), time.perf_counter()
    todo = (line for line in reading.read(source) if line.custom_id not in results.done)

    async def some() -> None:
        for line in todo:  # all coroutines take lines from the same generator
            answered = await answer(line)
            results.append(answered)
            report.count(answered)
            report.seconds = time.perf_counter() - began
            update(report.lines + report.errors, total, f"{report.tok_s:,.0f} tok/s")

    with shown(progress, "answering") as update:
        await asyncio.gather(*(some() for _ in range(min(window, total))))
    return report
