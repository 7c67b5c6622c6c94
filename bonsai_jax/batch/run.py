"""A batch: every line without an answer, many under way, each appended to the output when it is answered.

    lines of the input -> `window` coroutines, each with a line -> answer(line) -> a line of the output

`answer` is an Engine's in this process (answers.py) or that of actors elsewhere (on_ray.py): nothing else
differs.
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
from bonsai_jax.batch.results import Results
from bonsai_jax.model import Model
from bonsai_jax.progress import Progress, shown
from bonsai_jax.weights import placement

Answer = Callable[[Line], Awaitable[dict[str, Any]]]
# Times as many lines under way as rows, so that a free row finds one whose prompt is tokens already.
AHEAD = 4


@dataclasses.dataclass
class Report:
    """What was done, and what it cost.

    lines, errors    answered now, and in vain
    done_before      lines that were in the output already
    prompt_tokens, new_tokens   of the lines that were answered now
    seconds          of answering, without loading a model
    devices          that were held meanwhile
    cpu_seconds      of this process, all threads together; of actors elsewhere nothing is known
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
    """Answer each line of `source` that `output` has no answer to, and append the answers there.

    model     or what loads it by its name, once the files are read and there is work to do
    named     the name to load; None: the one that the lines have, and where they have none "demo"
    progress  True: a bar on stderr; or called with lines answered so far and all that are to be
    Raises ValueError for a file that is not what it should be, before anything is written, and RuntimeError
    if the engine gives up; what was answered until then is in `output`.
    """
    source = Path(source)
    with Results(Path(output)) as results:
        one_model = callable(model) and named is None
        needs = reading.needs(source, reading.read(source), results.done, one_model=one_model)
        if not needs.lines:
            return Report(done_before=len(results.done))
        loaded = model((needs.model or "demo") if named is None else named) if callable(model) else model
        answer, cpu = Answers(loaded, job, needs), time.process_time()
        try:
            window = AHEAD * job.rows * placement.size(loaded.mesh, placement.DATA)
            report = asyncio.run(each(source, needs.lines, results, answer, window, progress))
        finally:
            answer.close()
        report.devices = 1 if loaded.mesh is None else loaded.mesh.size
        report.cpu_seconds = time.process_time() - cpu
        return report


async def each(
    source: Path, total: int, results: Results, answer: Answer, window: int, progress: Progress
) -> Report:
    """Answer lines that are not in `results`, at most `window` at once."""
    report, began = Report(done_before=len(results.done)), time.perf_counter()
    todo = (line for line in reading.read(source) if line.custom_id not in results.done)

    async def some() -> None:
        for line in todo:  # one generator for all
            answered = await answer(line)
            results.append(answered)
            report.count(answered)
            report.seconds = time.perf_counter() - began
            update(report.lines + report.errors, total, f"{report.tok_s:,.0f} tok/s")

    with shown(progress, "answering") as update:
        await asyncio.gather(*(some() for _ in range(min(window, total))))
    return report
